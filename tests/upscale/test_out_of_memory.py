"""Memory that runs out around the network: the rows of tiles are put together elsewhere, or the network takes less."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from redline.ladder.plan import Plan
from redline.machine.pinned_copies import PendingCopy, PinnedCopies, PlainCopies
from redline.upscale import image_run
from redline.upscale.blend import Blender
from redline.upscale.image_run import ImageJob, ImageRun
from redline.upscale.images.sink import ImageSink
from redline.upscale.network import Network
from redline.upscale.session import Upscaling
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Task
from redline.upscale.tile_runner import TileRunner, WholeImages
from redline.upscale.tiling import Cut, TileShape, Tiling, count_tiles
from redline.upscale.video import run as video_run
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import VideoSettings
from upscale.video.clips import make_clip, shown

Strips = Iterator[tuple[slice, Tensor]]
TILES = Tiling((TileShape(Cut(24, 4, 4, 4), Cut(40, 4, 4, 4)), TileShape(Cut(40, 4, 4, 4), Cut(24, 4, 4, 4))))


class Twice(nn.Module):
    """Every pixel four times, so that what must come out is known exactly."""

    def __init__(self, runs_out: Callable[[Tensor], bool] = lambda _: False) -> None:
        super().__init__()
        self.runs_out, self.seen = runs_out, set()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.runs_out(x):
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        self.seen.add(tuple(x.shape[-2:]))
        return (x * self.scale).repeat_interleave(2, -1).repeat_interleave(2, -2)


class Apart(PlainCopies):
    """A device with memory of its own: tensors on it are those of `cpu:0`, and main memory is `cpu`."""

    has_device_memory = True


def made(said: list[str], module: nn.Module | None = None, apart: bool = True, batch: int = 3) -> TileRunner:
    network = Network(module or Twice(), 2, 4, "a planted network", "digest")
    using = TileRunner(network, Plan(), "cpu:0", TILES, batch, said.append)
    using.copies = Apart() if apart else PlainCopies()
    return using


def on_device(blender: Blender) -> bool:
    return blender.device.index is not None


def save(path: Path, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(samples).save(path)
    return samples


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def enlarged(folder: Path, using: TileRunner, *shapes: tuple[int, ...]) -> None:
    """Runs images of these shapes, and holds the results against what they must be."""
    tasks, expected = [], []
    for index, shape in enumerate(shapes):
        tasks.append(Task(folder / f"{index}.png", folder / "out" / f"{index}.png"))
        expected.append(save(tasks[-1].source, shape, index).repeat(2, 0).repeat(2, 1))
    outcomes = ImageRun(using, ImageSettings()).run(tasks)
    assert not any(outcome.error for outcome in outcomes)
    for task, wanted in zip(tasks, expected, strict=True):
        result = pixels(task.target)
        if wanted.shape[-1] == 4:  # colour is multiplied by alpha and divided again
            assert np.array_equal(result[..., 3], wanted[..., 3])
            visible = wanted[..., 3] > 0
            assert np.abs(result.astype(int) - wanted)[visible].max() <= 1
        else:
            assert np.array_equal(result, wanted)


def test_lying_and_upright_pictures_in_one_run(tmp_path: Path) -> None:
    module = Twice()
    enlarged(tmp_path, made([], module, apart=False), (50, 131, 3), (131, 50, 4), (20, 38), (40, 24, 3))
    assert module.seen == {(24, 40), (40, 24)}


SENTENCE = "out of memory: from now on, images 300 pixels wide are blended in main memory"


@pytest.mark.parametrize("channels", [3, 4])
def test_a_wide_picture_is_put_together_in_main_memory(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second row of tiles on, when rows are carried over already; narrow ones stay on the device."""
    said, places = [], []
    blend = Blender.blend

    def planted(self: Blender, row: int, tiles: object) -> Strips:
        width = self._columns.length
        places.append((width, on_device(self)))
        yield from blend(self, row, tiles)
        if on_device(self) and width > 200 and row > 0:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    monkeypatch.setattr(Blender, "blend", planted)
    enlarged(tmp_path, made(said), (60, 300, channels), (61, 50, 3), (60, 301, 3), (300, 61, 3))
    assert said == [SENTENCE]
    wide = [there for width, there in places if width == 300]
    assert wide[:2] == [True, True] and not any(wide[2:]) and len(wide) > 3
    assert not any(there for width, there in places if width == 301)
    assert all(there for width, there in places if width < 200)


@pytest.mark.parametrize("at_end", [False, True])
def test_memory_that_runs_out_behind_the_blending_does_not_blend_twice(
    at_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is carried over to the next row has gone on by then, and must go back."""
    said, calls = [], []
    from_planes, across = image_run.from_planes, count_tiles(300, TILES.shape_for((300, 90)).columns)

    def planted(*arguments: object) -> Tensor:
        calls.append(1)
        if len(calls) == at_end * (across - 1) + across + 1:  # of the second row, the first strip or the last
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return from_planes(*arguments)

    monkeypatch.setattr(image_run, "from_planes", planted)
    enlarged(tmp_path, made(said), (90, 300, 3))
    assert said == [SENTENCE]


def test_a_network_that_finds_no_room_beside_the_rows_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, freed = [], []
    leave = ImageJob.blend_in_main_memory
    monkeypatch.setattr(ImageJob, "blend_in_main_memory", lambda self: (freed.append(1), leave(self)))
    enlarged(tmp_path, made(said, Twice(lambda _: not freed)), (60, 300, 3))
    assert said[-1] == SENTENCE and all("continuing with" in text for text in said[:-1])


def test_where_there_is_no_other_memory_the_network_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    using, blend = made(said, apart=False), Blender.blend

    def planted(self: Blender, row: int, tiles: object) -> Strips:
        if row and using.batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return blend(self, row, tiles)

    monkeypatch.setattr(Blender, "blend", planted)
    enlarged(tmp_path, using, (60, 300, 3))
    assert said == ["out of memory: continuing with 1 tile at a time"]


@pytest.mark.parametrize("apart", [False, True])
def test_a_picture_that_finds_no_memory_is_one_failure_among_others(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are made, with as many tiles at a time as before."""
    blend = Blender.blend

    def planted(self: Blender, row: int, tiles: object) -> Strips:
        if self._columns.length == 300:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return blend(self, row, tiles)

    monkeypatch.setattr(Blender, "blend", planted)
    tasks = [Task(tmp_path / f"{index}.png", tmp_path / "out" / f"{index}.png") for index in range(3)]
    for task, width in zip(tasks, (60, 300, 70), strict=True):
        save(task.source, (90, width, 3))
    using = made([], apart=apart)
    failed = [outcome for outcome in ImageRun(using, ImageSettings()).run(tasks) if outcome.error]
    assert [outcome.task for outcome in failed] == [tasks[1]] and using.taken_at_once == (3, 0)
    message = f"{str(tasks[1].source)!r}: out of memory even with one tile of 20 × 20: free some memory."
    assert failed[0].error == message
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.png", "2.png"]


@pytest.mark.parametrize(
    ("owner", "name", "is_wide"),
    [
        (image_run, "open_image", lambda path: path.name == "1.png"),
        (ImageJob, "band", lambda image: image.width == 600),
        (ImageSink, "write_rows", lambda sink: sink.shape[1] == 600),
        (ImageSink, "finish", lambda sink: sink.shape[1] == 600),
    ],
)
def test_main_memory_that_runs_out_around_a_picture(
    owner: Any, name: str, is_wide: Callable[[Any], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [Task(tmp_path / f"{index}.png", tmp_path / "out" / f"{index}.png") for index in range(3)]
    for task, width in zip(tasks, (60, 300, 70), strict=True):
        save(task.source, (90, width, 3))
    before = getattr(owner, name)

    def planted(first: Any, *others: Any, **options: Any) -> Any:
        if is_wide(first):
            raise MemoryError("planted")
        return before(first, *others, **options)

    monkeypatch.setattr(owner, name, planted)
    outcomes = ImageRun(made([]), ImageSettings()).run(tasks)
    failed = {outcome.task: outcome.error for outcome in outcomes if outcome.error}
    assert failed == {tasks[1]: f"out of memory at {str(tasks[1].source)!r}: free some memory."}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.png", "2.png"]


LATE_COPIES = "out of memory: inputs that cannot be prefetched are copied when they are used"


class Full(PinnedCopies):
    """A device that has no room for what comes in; what goes out goes at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(FullDevice(), iter(()), iter(()), 2, warn=say)

    def to_host(self, tensor: Tensor, into: Tensor | None = None, ring: int | None = None) -> PendingCopy:
        return PlainCopies().to_host(tensor)


class FullDevice:
    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")


def test_a_band_that_cannot_be_brought_in_is_worked_on_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    using = made(said)
    using.copies = Full(said.append)
    enlarged(tmp_path, using, (60, 300, 3), (50, 41, 4))
    assert said == [LATE_COPIES]


def test_the_pictures_of_a_film_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said, blend = [], Blender.blend
    frames, whole = torch.rand(2, 3, 50, 90), WholeImages(made(said))

    def planted(self: Blender, row: int, tiles: object) -> Strips:
        if row and whole._place.index is not None:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return blend(self, row, tiles)

    monkeypatch.setattr(Blender, "blend", planted)
    for _ in range(2):
        expected = frames.repeat_interleave(2, -1).repeat_interleave(2, -2)
        torch.testing.assert_close(whole(frames, lambda large: large), expected, atol=1e-6, rtol=0)
    assert said == [LEAVES]


LEAVES = "out of memory: from now on, tiles are blended in main memory"


def upscaled_film(folder: Path, whole: WholeImages) -> np.ndarray:
    settings, copies = VideoSettings(codec="ffv1"), whole._tile_runner.copies
    upscale_video(folder / "a.mkv", folder / "b.mkv", whole, 2, settings, lambda _: None, copies)
    return np.stack([pixels for _, pixels in shown(folder / "b.mkv")])


def test_the_planes_of_a_film_are_made_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out in the conversion behind the network; and before it, where images come in."""
    make_clip(tmp_path / "a.mkv", frames=3, codec="ffv1", options={"level": "3"})
    expected, to_planes = upscaled_film(tmp_path, WholeImages(made([]))), video_run.to_planes
    for copies, sentences in ((Apart(), [LEAVES]), (None, [LATE_COPIES, LEAVES])):
        said: list[str] = []
        using = made(said)
        using.copies = copies or Full(said.append)
        whole = WholeImages(using)

        def planted(*arguments: object, whole: WholeImages = whole) -> list[Tensor]:
            if whole._place.index is not None:
                raise torch.OutOfMemoryError("CUDA out of memory (planted)")
            return to_planes(*arguments)

        monkeypatch.setattr(video_run, "to_planes", planted)
        assert np.array_equal(upscaled_film(tmp_path, whole), expected) and said == sentences


def test_a_film_that_finds_no_memory_is_one_failure_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*_: object) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    make_clip(tmp_path / "a.mkv", frames=2)
    upscaling = Upscaling(UpscaleSettings(scale=2, device="cpu"))
    task = Task(tmp_path / "a.mkv", tmp_path / "b.mkv")
    monkeypatch.setattr(video_run, "to_planes", planted)
    assert "out of memory even with one tile" in upscaling.upscale_video_task(task, made([])).error
    monkeypatch.setattr(video_run, "to_rgb", planted)
    assert upscaling.upscale_video_task(task, made([])).error.startswith("out of memory at ")


def test_tiles_of_all_rows_are_under_way_while_one_is_waited_for() -> None:
    """The next batch is begun before the last one's answer is asked for, whatever row of tiles it belongs to."""
    order: list[str] = []

    class Noting(PlainCopies):
        def to_host(self, tensor: Tensor, into: Tensor | None = None, ring: int | None = None) -> PendingCopy:
            return PendingCopy(tensor, lambda: order.append("asked"), lambda: None)

    using = TileRunner(
        Network(Twice(lambda _: bool(order.append("begun"))), 2, 4, "a network", "digest"), Plan(), "cpu", TILES, 4
    )
    using.copies, using._ahead = Noting(), 2
    WholeImages(using)(torch.rand(1, 3, 60, 40), lambda large: large)
    assert order == ["begun", *["begun", "asked"] * (order.count("begun") - 1), "asked"] and order.count("begun") > 2


def test_devices_have_memory_of_their_own() -> None:
    assert PinnedCopies.has_device_memory and not PlainCopies.has_device_memory
