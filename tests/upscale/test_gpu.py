"""Upscaling on a GPU: the same bytes by any streams, bounded memory, and a way on when memory or range run out."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from redline.ladder.plan import Plan
from redline.machine.memory import free_cuda_caches
from redline.machine.pinned_copies import copies_for
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale.blend import enlarge_by_tiles
from redline.upscale.image_run import ImageRun
from redline.upscale.network import Network
from redline.upscale.session import Upscaling
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Listener, Outcome, Task, find_tasks
from redline.upscale.tile_choice import measure_cost, memory_for_tiles
from redline.upscale.tile_runner import TileRunner, WholeImages
from redline.upscale.tiling import Cut, TileShape, Tiling
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import VideoSettings
from upscale.video.clips import make_clip, shown

pytestmark = pytest.mark.gpu
TILES = Tiling.square(Cut(64, 8, 8, 16))


def small() -> Drct:
    torch.manual_seed(0)
    return Drct(DrctConfig.of(2, 2, width=60, growth=16, features=16, window=16)).eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_drct(small(), path)
    return path


def save(path: Path, shape: tuple[int, ...], seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(samples).save(path)
    return path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def made(
    module: nn.Module, plan: str = "", batch: int = 2, streams: int = 2, said: list[str] | None = None
) -> TileRunner:
    network = Network(module, 2, 16, "a planted network", "digest")
    say = said.append if said is not None else lambda _text: None
    return TileRunner(network, Plan.parse(plan), "cuda:0", TILES, batch, say, streams)


def run(tasks: list[Task], using: TileRunner) -> list[Outcome]:
    return ImageRun(using, ImageSettings()).run(tasks)


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    shapes = [(70, 333, 3), (200, 90, 4), (150, 151), (1, 1, 3), (64, 64, 3)]
    return [save(tmp_path / "in" / f"{index}.png", shape, index) for index, shape in enumerate(shapes)]


def last_column(tensor: Tensor) -> Tensor:
    return tensor[:, -1] if tensor.ndim == 2 else tensor


def test_copies_come_back_as_they_left_while_the_gpu_is_busy() -> None:
    """Work that takes long stands before every copy, so that whoever does not wait reads something else."""
    copies = copies_for(torch.device("cuda:0"), 3, print)
    large = torch.randn(4096, 4096, device="cuda")
    sent = [torch.randint(0, 256, (300_000 + index,), dtype=torch.uint8) for index in range(24)]
    going = []
    for one in sent:
        coming = copies.to_device(one)
        for _ in range(4):
            large = large @ large
            large /= large.abs().max()
        result = coming.wait() + 1
        coming.release()
        # Every other one has to be made contiguous first, which takes a while as well.
        going.append(copies.to_host(result[None].expand(64, -1).T if len(going) % 2 else result))
        if len(going) > 3:
            before = going[-4]
            assert torch.equal(last_column(before.wait()), sent[len(going) - 4] + 1)
            before.release()
    for one, arriving in zip(sent[-3:], going[-3:], strict=True):
        assert torch.equal(last_column(arriving.wait()), one + 1)


@pytest.mark.parametrize("plan", ["", "fused_ops + bf16 + cuda_graph"])
def test_any_number_of_streams_writes_the_same_bytes(plan: str, images: list[Path], tmp_path: Path) -> None:
    for streams in (1, 2, 3):
        tasks = [Task(path, tmp_path / str(streams) / path.name) for path in images]
        assert not any(outcome.error for outcome in run(tasks, made(small(), plan, streams=streams)))
    for path in images:
        first = (tmp_path / "1" / path.name).read_bytes()
        assert all((tmp_path / other / path.name).read_bytes() == first for other in "23")


def test_the_gpu_agrees_with_the_cpu(images: list[Path], tmp_path: Path) -> None:
    for folder, device in (("gpu", "cuda:0"), ("cpu", "cpu")):
        network = Network(small(), 2, 16, "a small DRCT", "digest")
        tasks = [Task(path, tmp_path / folder / path.name) for path in images]
        assert not any(outcome.error for outcome in run(tasks, TileRunner(network, Plan(), device, TILES, 2)))
    for path in images:
        one, other = (premultiplied(pixels(tmp_path / folder / path.name)) for folder in ("gpu", "cpu"))
        assert np.abs(one - other).max() <= 2
        assert np.abs(one - other).mean() < 0.2


def premultiplied(samples: np.ndarray) -> np.ndarray:
    """Colour as it is seen: under a transparent pixel it is divided by next to nothing, and may be any."""
    if samples.shape[-1:] != (4,):
        return samples
    alpha = samples[..., 3:]
    return np.concatenate([samples[..., :3] * alpha / 255, alpha], -1)


@pytest.mark.parametrize("streams", [1, 3])
def test_memory_does_not_grow_with_the_picture(streams: int, tmp_path: Path) -> None:
    peaks = []
    for height in (400, 1600):
        using = made(small(), "fused_ops + bf16 + cuda_graph", streams=streams)
        task = Task(save(tmp_path / f"{height}.png", (height, 300, 3)), tmp_path / "out" / f"{height}.png")
        free_cuda_caches()  # memory of earlier tests that is freed during the run would lower the peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert not run([task], using)[0].error
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0] + 2**20, peaks


def test_one_graph_serves_all_tiles(images: list[Path], tmp_path: Path) -> None:
    """Whatever the images' sizes and however full the last batch is."""
    using = made(small(), "fused_ops + bf16 + cuda_graph", batch=4)
    assert not any(o.error for o in run([Task(path, tmp_path / "out" / path.name) for path in images], using))
    assert using._fast is not None
    tally = using._fast.job.evidence["cuda_graph"]
    assert tally.graphs == 1 and tally.replays > 10 and not tally.uncaptured


class Hungry(nn.Module):
    """Every pixel four times, on the way through more memory than is allowed."""

    def __init__(self, bytes_per_pixel: int) -> None:
        super().__init__()
        self.each, self.scale = bytes_per_pixel, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        large = torch.empty(x.shape[0] * x.shape[2] * x.shape[3] * self.each, dtype=torch.uint8, device=x.device)
        large[:1].zero_()
        return (x * self.scale).repeat_interleave(2, -1).repeat_interleave(2, -2)


@contextlib.contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """torch may take so much more than it has now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size_bytes) / total, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.parametrize("plan", ["", "cuda_graph"])
def test_out_of_memory_goes_on_with_less(plan: str, tmp_path: Path) -> None:
    """A tile of 64 × 64 wants 400 MB and there are 300: from four at a time to one, and then to smaller tiles."""
    source = save(tmp_path / "in.png", (150, 301, 3))
    said: list[str] = []
    using = made(Hungry(400 * 10**6 // 64**2), plan, batch=4, said=said)
    with at_most(300 * 10**6):
        (outcome,) = run([Task(source, tmp_path / "out.png")], using)
    assert not outcome.error, outcome.error
    expected = pixels(source).repeat(2, 0).repeat(2, 1)
    assert np.array_equal(pixels(tmp_path / "out.png"), expected)
    assert [text.split("continuing with ")[1] for text in said] == [
        "2 tiles at a time",
        "1 tile at a time",
        "tiles of 48 × 48",
    ]


def test_a_wide_picture_that_does_not_fit_is_put_together_in_main_memory(tmp_path: Path) -> None:
    """Its rows of tiles take about 80 MB on the way, and a batch of tiles next to nothing."""
    source, said = save(tmp_path / "in.png", (150, 20_000, 3)), []
    with at_most(40 * 10**6):
        (outcome,) = run([Task(source, tmp_path / "out.png")], made(Hungry(0), said=said))
    assert not outcome.error, outcome.error
    # With as little, the next row is not copied in ahead either, and fewer tiles may go at a time.
    assert "out of memory: from now on, images 20,000 pixels wide are blended in main memory" in said
    assert np.array_equal(pixels(tmp_path / "out.png"), pixels(source).repeat(2, 0).repeat(2, 1))
    unlimited: list[str] = []
    assert not run([Task(source, tmp_path / "free.png")], made(Hungry(0), said=unlimited))[0].error and not unlimited
    assert (tmp_path / "out.png").read_bytes() == (tmp_path / "free.png").read_bytes()


def test_a_film_is_the_same_by_any_streams_and_in_any_memory(tmp_path: Path) -> None:
    """Enlarged, one of its images has 115 MB; with 80 it is put together, and converted, in main memory."""
    make_clip(tmp_path / "a.mkv", frames=3, size=(2000, 1200), codec="ffv1", options={"level": "3"})
    results = []
    for streams, memory_bytes in ((1, 10**10), (3, 10**10), (2, 80 * 10**6)):
        said: list[str] = []
        using, target = made(Hungry(0), streams=streams, said=said), tmp_path / f"{len(results)}.mkv"
        arguments = (WholeImages(using), 2, VideoSettings(codec="ffv1"), lambda _: None, using.copies)
        with at_most(memory_bytes):
            upscale_video(tmp_path / "a.mkv", target, *arguments)
        results.append(np.stack([image for _, image in shown(target)]))
        assert any("blended in main memory" in text for text in said) == (memory_bytes < 10**9), said
    assert np.array_equal(results[0], results[1]) and np.abs(results[0].astype(int) - results[2]).max() <= 1


def test_a_graph_for_each_of_two_shapes(tmp_path: Path) -> None:
    wide = TileShape(Cut(48, 8, 8, 16), Cut(80, 8, 8, 16))
    network = Network(small(), 2, 16, "a small DRCT", "digest")
    tiling = Tiling((wide, TileShape(wide.columns, wide.rows)))
    using = TileRunner(network, Plan.parse("fused_ops + bf16 + cuda_graph"), "cuda:0", tiling, 2)
    sources = [save(tmp_path / f"{i}.png", shape, i) for i, shape in enumerate([(90, 200, 3), (200, 90, 3)] * 2)]
    assert not any(o.error for o in run([Task(path, tmp_path / "out" / path.name) for path in sources], using))
    assert using._fast is not None
    tally = using._fast.job.evidence["cuda_graph"]
    assert tally.graphs == 2 and tally.replays > 10 and not tally.uncaptured
    plain = TileRunner(network, Plan(), "cuda:0", tiling, 2)
    assert not any(o.error for o in run([Task(path, tmp_path / "exact" / path.name) for path in sources], plain))
    for path in sources:
        difference = np.abs(pixels(tmp_path / "out" / path.name) - pixels(tmp_path / "exact" / path.name))
        assert difference.max() <= 4 and difference.mean() < 0.5


def test_out_of_memory_to_the_end_is_a_sentence(tmp_path: Path) -> None:
    source = save(tmp_path / "in.png", (64, 64, 3))
    with at_most(100 * 10**6):
        (outcome,) = run([Task(source, tmp_path / "out.png")], made(Hungry(10**6), batch=1))
    assert "out of memory even with one tile" in outcome.error and outcome.error.endswith("or use --device cpu.")
    assert not (tmp_path / "out.png").exists()


class Overflowing(nn.Module):
    """Too large for fp16 on the way where a tile is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale) * 3e5).repeat_interleave(2, -1).repeat_interleave(2, -2) / 3e5


@pytest.mark.parametrize("plan", ["fp16(check=false)", "fp16(check=false) + cuda_graph"])
def test_a_tile_that_overflows_is_done_again_in_bf16(plan: str, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).integers(128, 256, (200, 300, 3), dtype=np.uint8)
    samples[:80] >>= 3  # the first tiles are dark, and fit
    Image.fromarray(samples).save(tmp_path / "in.png")
    results = []
    for streams in (1, 3):
        said: list[str] = []
        target = tmp_path / f"{streams}.png"
        (outcome,) = run([Task(tmp_path / "in.png", target)], made(Overflowing(), plan, streams=streams, said=said))
        assert not outcome.error and said == ["fp16 was replaced by bf16: its output has values that are not finite"]
        assert np.abs(pixels(target) - pixels(tmp_path / "in.png").repeat(2, 0).repeat(2, 1)).max() <= 2
        results.append(target.read_bytes())
    assert results[0] == results[1]


def test_the_measured_cost_of_a_tile_holds_for_larger_ones() -> None:
    """What is foretold from small tiles is about what a larger one takes."""
    network = Network(small(), 2, 16, "a small DRCT", "digest")
    cost = measure_cost(network, "cuda:0")
    for tile, batch in ((128, 1), (192, 2)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            network.module(torch.rand(batch, 3, tile, tile, device="cuda:0"))
        seen = torch.cuda.max_memory_allocated() - before
        assert 0.7 * seen < cost.bytes(batch * tile**2) < 1.5 * seen + 2**22
    free, total = torch.cuda.mem_get_info()
    assert 0.7 * free < memory_for_tiles("cuda:0") < 0.9 * total


def test_a_whole_upscaling_by_the_shipped_plan(weights: Path, images: list[Path], tmp_path: Path) -> None:
    """With automatic tiles; and in two worker processes that share the GPU, the same bytes for the same tile."""
    said: list[str] = []
    tasks = find_tasks([tmp_path / "in"], tmp_path / "one", 2)
    settings = UpscaleSettings(weights, device="cuda", memory_bytes=2**31, workers=1)
    one = Upscaling(settings, Listener(said.append))
    assert not any(outcome.error for outcome in one.run(tasks))
    assert "fused_ops + fp16 + cuda_graph" in said[0] and one.tile_runner is not None
    given = replace(settings, tile=one.tile_runner.tiling.sizes[0], tile_batch=one.tile_runner.batch, memory_bytes=None)
    alone, shared = (find_tasks([tmp_path / "in"], tmp_path / folder, 2) for folder in ("alone", "shared"))
    assert not any(outcome.error for outcome in Upscaling(given).run(alone))
    two = Upscaling(replace(given, workers=2), Listener(said.append))
    assert not any(outcome.error for outcome in two.run(shared))
    assert any(text.endswith("2 workers") for text in said), said
    for first, second in zip(alone, shared, strict=True):
        assert first.target.read_bytes() == second.target.read_bytes()


def test_the_next_picture_of_a_size_keeps_nobody_waiting() -> None:
    """What a video's frames have in common is sent to the device with the first."""
    shape = TileShape(Cut(64, 8, 8, 16), Cut(64, 8, 8, 16))

    def enlarge(tiles: Tensor) -> Tensor:
        return nn.functional.interpolate(tiles, scale_factor=2)

    first, second = torch.rand(2, 1, 3, 150, 200, device="cuda")
    enlarge_by_tiles(first, enlarge, 2, shape, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = enlarge_by_tiles(second, enlarge, 2, shape, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, enlarge(second))
