"""Images from disk to disk: the right pixels, whatever the timing, and one bad file among good ones."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
import pyvips
import torch
from PIL import Image
from torch import Tensor, nn

from redline.errors import ModelError
from redline.files.partial import is_partial
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.upscale.image_run import ImageRun
from redline.upscale.network import Network
from redline.upscale.settings import ImageSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tile_runner import TileRunner, squares_to_judge
from redline.upscale.tiling import Cut, Tiling


class Twice(nn.Module):
    """Every pixel four times, so that what must come out is known exactly."""

    def __init__(self, fails_above: int = 10**9) -> None:
        super().__init__()
        self.fails_above, self.calls, self.scale = fails_above, 0, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.numel() > self.fails_above:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return (x * self.scale).repeat_interleave(2, -1).repeat_interleave(2, -2)


def tile_runner(
    module: nn.Module | None = None, plan: str = "", batch: int = 3, said: list[str] | None = None
) -> TileRunner:
    network = Network(module or Twice(), 2, 4, "a planted network", "digest")
    say = said.append if said is not None else lambda _text: None
    return TileRunner(network, Plan.parse(plan), "cpu", Tiling.square(Cut(32, 4, 4, 4)), batch, say)


def run(tasks: list[Task], using: TileRunner | None = None, **settings: bool) -> list[Outcome]:
    return ImageRun(using or tile_runner(), ImageSettings(**settings)).run(tasks)


def save(path: Path, shape: tuple[int, ...], seed: int = 0, kind: type = np.uint8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, np.iinfo(kind).max + 1, shape, dtype=kind)
    Image.fromarray(samples).save(path)
    return samples


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def doubled(samples: np.ndarray) -> np.ndarray:
    return samples.repeat(2, 0).repeat(2, 1)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 97, 3), (130, 2, 3), (64, 64, 3), (75, 91, 3), (40, 33), (50, 41, 4)])
def test_every_pixel_is_where_it_belongs(shape: tuple[int, ...], wrap: bool, tmp_path: Path) -> None:
    samples = save(tmp_path / "in.png", shape)
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out" / "big.png")], wrap=wrap)
    assert not outcome.error and (outcome.height, outcome.width) == (2 * shape[0], 2 * shape[1])
    result = pixels(tmp_path / "out" / "big.png")
    expected = doubled(samples)
    if len(shape) == 3 and shape[2] == 4:
        assert np.array_equal(result[..., 3], expected[..., 3])
        seen = expected[..., 3] > 0
        # Colour is multiplied by alpha and divided again: exact to a level where alpha is large.
        assert np.abs(result.astype(int) - expected)[seen].max() <= 1
    else:
        assert np.array_equal(result, expected)


def test_sixteen_bits_stay_exact(tmp_path: Path) -> None:
    samples = save(tmp_path / "in.png", (70, 45), kind=np.uint16)
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")])
    assert not outcome.error and np.array_equal(pixels(tmp_path / "out.png"), doubled(samples))


def test_transparent_pixels_do_not_bleed(tmp_path: Path) -> None:
    samples = np.zeros((40, 40, 4), np.uint8)
    samples[:, :20] = (200, 100, 50, 255)  # opaque on the left, transparent black on the right

    class Blurred(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(super().forward(x), 3, 1, 1, count_include_pad=False)

    Image.fromarray(samples).save(tmp_path / "in.png")
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(Blurred()))
    result = pixels(tmp_path / "out.png").astype(int)
    visible = result[..., 3] > 8
    assert not outcome.error and (result[..., 3][visible] < 250).any()
    assert np.abs(result[visible][:, :3] - (200, 100, 50)).max() <= 3


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_flat_transparency_is_exact_whatever_the_network_makes_of_it(kind: type, wrap: bool, tmp_path: Path) -> None:
    """Without bounds invisible pixels are faintly seen, and opaque ones faintly seen through."""
    most = np.iinfo(kind).max
    rng = np.random.default_rng(0)
    alpha = np.zeros((70, 75), kind)
    alpha[:, 30:60] = most
    alpha[40:, 64:] = most // 3
    alpha[:12, :20] = rng.integers(0, most + 1, (12, 20), dtype=kind)

    class Shaky(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.98 + 0.01 * torch.rand(())

    if kind is np.uint8:
        Image.fromarray(np.dstack([alpha, alpha, alpha, alpha])).save(tmp_path / "in.png")
    else:
        sixteen = np.ascontiguousarray(np.dstack([alpha] * 4))
        pyvips.Image.new_from_array(sixteen, interpretation="rgb16").pngsave(str(tmp_path / "in.png"))
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(Shaky()), wrap=wrap)
    assert not outcome.error
    result = pyvips.Image.new_from_file(str(tmp_path / "out.png")).numpy()[..., 3]
    edges = np.pad(alpha, 1, mode="wrap" if wrap else "symmetric")
    around = np.stack([edges[y : y + 70, x : x + 75] for y in range(3) for x in range(3)])
    least, most_around = doubled(around.min(0)), doubled(around.max(0))
    flat = least == most_around
    assert flat.mean() > 0.6 and np.array_equal(result[flat], least[flat])
    assert ((least <= result) & (result <= most_around)).all() and (result != doubled(alpha)).any()


def test_one_bad_file_among_good_ones(tmp_path: Path) -> None:
    tasks = []
    for index in range(6):
        path = tmp_path / f"{index}.png"
        save(path, (60 + index, 50, 3), index)
        tasks.append(Task(path, tmp_path / "out" / path.name))
    whole = tasks[2].source.read_bytes()
    tasks[2].source.write_bytes(whole[: len(whole) // 2])
    tasks[4].source.write_text("no image")
    heard: list[Outcome] = []
    outcomes = ImageRun(tile_runner(), ImageSettings(), heard.append).run(tasks)
    failed = {o.task.source.name: o.error for o in outcomes if o.error}
    assert sorted(failed) == ["2.png", "4.png"] and all(error.endswith(".") for error in failed.values())
    assert sorted(o.task.source.name for o in heard) == [f"{i}.png" for i in range(6)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0.png", "1.png", "3.png", "5.png"]


def test_the_timing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage dawdles at random, and the bytes are those of a calm run."""
    tasks = [Task(tmp_path / f"{i}.png", tmp_path / "calm" / f"{i}.png") for i in range(5)]
    for index, task in enumerate(tasks):
        save(task.source, (50 + 7 * index, 90 - 9 * index, 3 + index % 2), index)
    assert not any(o.error for o in run(tasks))
    rng = random.Random(3)

    def dawdling(method):  # noqa: ANN001, ANN202
        def slow(*args: object) -> object:
            time.sleep(rng.random() * 0.02)
            return method(*args)

        return slow

    for name in ("_work", "_write", "_encode"):
        monkeypatch.setattr(ImageRun, name, dawdling(getattr(ImageRun, name)))
    moved = [Task(task.source, tmp_path / "slow" / task.target.name) for task in tasks]
    assert not any(o.error for o in run(moved))
    for calm, slow in zip(tasks, moved, strict=True):
        assert calm.target.read_bytes() == slow.target.read_bytes()


def test_out_of_memory_shrinks_says_so_and_goes_on(tmp_path: Path) -> None:
    samples = save(tmp_path / "in.png", (100, 120, 3))
    said: list[str] = []
    # Room for one tile of 20 × 20 and no more: from a batch of three down to one, then to smaller tiles.
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(Twice(3 * 20 * 20), said=said))
    assert not outcome.error and np.array_equal(pixels(tmp_path / "out.png"), doubled(samples))
    assert said == [
        "out of memory: continuing with 1 tile at a time",
        "out of memory: continuing with tiles of 20 × 20",
    ]


def test_out_of_memory_to_the_end_is_a_sentence(tmp_path: Path) -> None:
    save(tmp_path / "in.png", (40, 40, 3))
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(Twice(10)))
    assert "out of memory even with one tile" in outcome.error
    assert not (tmp_path / "out.png").exists() and not any(is_partial(p) for p in tmp_path.iterdir())


class Overflowing(Twice):
    """Too large for fp16 on the way, and right in bf16 and fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e5) / 3e5


@pytest.mark.cpu
@pytest.mark.parametrize("dark_rows", [0, 60])
@pytest.mark.parametrize("safer", ["bf16", "fp32"])
def test_a_tile_that_overflows_in_fp16_is_done_again(
    safer: str, dark_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or when a bright tile comes after dark ones; in bf16, or in fp32 where the machine has no bf16."""
    monkeypatch.setattr(Machine, "why_slow", lambda _, dtype, *__: "" if dtype in ("fp16", safer) else "no hardware")
    samples = save(tmp_path / "in.png", (100, 40, 3)) | 128
    samples[:dark_rows] >>= 3
    Image.fromarray(samples).save(tmp_path / "in.png")
    said: list[str] = []
    using = tile_runner(Overflowing(), "fp16(check=false)", said=said)
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], using)
    result = pixels(tmp_path / "out.png").astype(int)
    assert not outcome.error and np.abs(result - doubled(samples)).max() <= 2
    assert len(said) == 1 and said[0].startswith(f"fp16 was replaced by {safer}: ")
    assert "not finite" in said[0] if dark_rows else "dB on the first tiles" in said[0]


@pytest.mark.cpu
@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("from_count", [1, 3])
def test_a_network_that_does_not_run_in_a_precision_runs_in_a_safer_one(from_count: int, tmp_path: Path) -> None:
    """Some have numbers of their own in fp32, which no product with bf16 takes; perhaps not where it is judged."""

    class Mixed(Twice):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < from_count:
                return super().forward(x)
            return super().forward((x.movedim(1, -1) @ torch.eye(3)).movedim(-1, 1))

    samples, said = save(tmp_path / "in.png", (60, 70, 3)), []
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(Mixed(), "bf16", said=said))
    assert not outcome.error and np.array_equal(pixels(tmp_path / "out.png"), doubled(samples))
    assert len(said) == 1 and said[0].startswith("bf16 was replaced by fp32: it does not run (expected ")


@pytest.mark.cpu
@pytest.mark.usefixtures("any_precision")
def test_a_clear_sky_is_no_reason_to_leave_a_precision(tmp_path: Path) -> None:
    """What bf16 changes in it is below what 8 bits can show, however little the tile spans."""
    sky = (save(tmp_path / "in.png", (100, 40, 3)) % 3) + 150
    Image.fromarray(sky).save(tmp_path / "in.png")
    said: list[str] = []
    using = tile_runner(Twice(), "bf16", said=said)
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], using)
    assert not outcome.error and not said and "bf16" in using.plan
    assert np.abs(pixels(tmp_path / "out.png").astype(int) - doubled(sky)).max() <= 2


@pytest.mark.usefixtures("any_precision")
def test_a_precision_is_judged_on_little_of_a_tile_where_most_is_to_be_seen(tmp_path: Path) -> None:
    """Plain fp32 takes ten times as long as what it judges."""

    class Seen(Twice):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float32:
                self.seen.append(x.clone())
            return super().forward(x)

    module = Seen()
    tiles = torch.full((2, 3, 320, 256), 0.5)
    tiles[1, :, 140:200, 130:190] = torch.rand(3, 60, 60)
    network = Network(module, 2, 4, "twice", "digest")
    using = TileRunner(network, Plan.parse("bf16"), "cpu", Tiling.square(Cut(320, 4, 4, 4)), 2)
    assert using(tiles).shape == (2, 3, 640, 512)
    (judged,) = module.seen
    assert judged.shape == (2, 3, 64, 64) and judged.std() > 0.2
    # Of a tile that is smaller, all of it.
    assert squares_to_judge(torch.rand(3, 3, 16, 32), 16).shape == (2, 3, 16, 32)


def test_what_is_compiled_or_recorded_is_judged_without_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the squares it would be compiled once more."""
    applied: list[tuple[str, torch.Size]] = []

    def apply(plan: Plan, module: nn.Module, *, samples: Tensor, **_: object) -> nn.Module:
        applied.append((str(plan), samples.shape))
        return module

    monkeypatch.setattr(Plan, "apply", apply)
    network = Network(Twice(), 2, 4, "twice", "digest")
    using = TileRunner(network, Plan.parse("bf16 + compile"), "cpu", Tiling.square(Cut(128, 4, 4, 4)), 1)
    assert using(torch.rand(1, 3, 128, 128)).shape == (1, 3, 256, 256)
    assert applied == [("bf16 + compile", (1, 3, 128, 128)), ("bf16", (2, 3, 64, 64))]


def test_weights_that_give_nan_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "in.png", (40, 40, 3))
    module = Twice()
    module.scale.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        run([Task(tmp_path / "in.png", tmp_path / "out.png")], tile_runner(module))
    assert not (tmp_path / "out.png").exists()


def test_what_cannot_be_written_is_said_before_any_work(tmp_path: Path) -> None:
    save(tmp_path / "in.png", (40, 40, 4))
    module = Twice()
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.jpg")], tile_runner(module))
    assert outcome.error and module.calls == 0
    (same,) = run([Task(tmp_path / "in.png", tmp_path / "in.png")], tile_runner(module))
    assert "is the source image" in same.error and pixels(tmp_path / "in.png").shape == (40, 40, 4)


@pytest.mark.cpu
@pytest.mark.usefixtures("any_precision")
def test_an_overflow_under_autocast_leaves_it_too(tmp_path: Path) -> None:
    class Wide(Twice):
        """Under autocast the convolution is computed in fp16, and overflows where a tile is bright."""

        def __init__(self) -> None:
            super().__init__()
            self.brighter = nn.Conv2d(3, 3, 1, bias=False)
            self.brighter.weight.data = 6e4 * torch.eye(3)[:, :, None, None]

        def forward(self, x: Tensor) -> Tensor:
            return self.brighter(2 * super().forward(x)).float() / 1.2e5

    samples = save(tmp_path / "in.png", (100, 40, 3)) | 128
    samples[:60] >>= 3
    Image.fromarray(samples).save(tmp_path / "in.png")
    said: list[str] = []
    using = tile_runner(Wide(), "autocast(dtype=fp16)", said=said)
    (outcome,) = run([Task(tmp_path / "in.png", tmp_path / "out.png")], using)
    assert not outcome.error and said and all("was replaced by" in text for text in said)
    assert said[0].startswith("autocast was replaced by")
    assert np.abs(pixels(tmp_path / "out.png").astype(int) - doubled(samples)).max() <= 2
