"""A whole upscaling: what paths mean, where results go, what is skipped, and what a run that was killed leaves."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from redline.cli.upscale import _tile
from redline.errors import RedlineError
from redline.files.partial import is_partial
from redline.ladder.plan import Plan
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale import tile_choice
from redline.upscale.journal import NAME, Journal
from redline.upscale.session import Upscaling
from redline.upscale.settings import ImageSettings, Tiles, UpscaleSettings, with_preset
from redline.upscale.tasks import Listener, Task, find_tasks
from redline.upscale.tile_choice import TileCost, TilePlanner, choose_tiles
from redline.upscale.tiling import Cut, cut_side, smallest_tile


def save(path: Path, height: int = 24, width: int = 31, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), path)
    return path


def names(tasks: list[Task], folder: Path) -> list[str]:
    return [str(task.target.relative_to(folder)) for task in tasks]


def test_where_results_go(tmp_path: Path) -> None:
    photo, video = save(tmp_path / "a.jpg"), tmp_path / "b.avi"
    video.touch()
    assert names(find_tasks([photo], None, 4), tmp_path) == ["a-x4.jpg"]
    assert names(find_tasks([photo], None, 2, "webp"), tmp_path) == ["a-x2.webp"]
    assert names(find_tasks([photo], tmp_path / "big.png", 4), tmp_path) == ["big.png"]
    assert names(find_tasks([photo], tmp_path / "folder", 4), tmp_path) == ["folder/a.jpg"]
    assert names(find_tasks([photo, video], tmp_path / "out", 4, "png"), tmp_path) == ["out/a.png", "out/b.mkv"]
    assert [task.is_video for task in find_tasks([photo, video], tmp_path / "out", 4)] == [False, True]


def test_a_folder_keeps_its_structure_and_never_eats_its_own_results(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    for name in ("b.png", "a/c.jpg", "a/d.gif", "a/e.TIFF", ".hidden/f.png", ".g.png"):
        path = inside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (inside / "notes.txt").touch()
    (inside / ".b.png.1.ab.redline-partial").touch()
    expected = ["b.png", "a/c.jpg", "a/d.png", "a/e.TIFF"]
    assert names(find_tasks([inside], None, 4), tmp_path / "in-x4") == expected
    out = inside / "out"
    save(out / "old.png")
    assert names(find_tasks([inside], out, 4), out) == expected


def test_paths_that_mean_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, sentence in (
        (([tmp_path / "absent.png"], None, 4), "it does not exist"),
        (([empty], None, 4), "no image or video found"),
        (([save(tmp_path / "x" / "a.png"), save(tmp_path / "y" / "a.png")], tmp_path / "out", 4), "would both become"),
        (([save(tmp_path / "a.png")], None, 4, "bmp"), "choose png, jpeg, webp, tiff, avif"),
        (([save(tmp_path / "a.png")], tmp_path / "out.bmp", 4), "bmp"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            find_tasks(*arguments)


def test_presets_fill_in_what_was_not_asked_for() -> None:
    assert with_preset(UpscaleSettings(), "memory").tile == 256
    assert with_preset(UpscaleSettings(margin_px=4), "speed") == UpscaleSettings(margin_px=4, ramp_px=8)
    assert with_preset(UpscaleSettings(tile=64), "memory").tile == 64
    assert with_preset(UpscaleSettings(), "quality").precision == "fp32"
    assert with_preset(UpscaleSettings(plan=Plan.parse("tf32")), "quality").precision == "auto"
    assert with_preset(UpscaleSettings(), "balanced") == UpscaleSettings()
    for bad in (
        {"precision": "fp64"},
        {"tile": 0},
        {"tile": (256, 0)},
        {"tile_batch": 0},
        {"plan": Path("p"), "precision": "bf16"},
    ):
        with pytest.raises(RedlineError):
            UpscaleSettings(**bad)
    # An exported network has its own tile and precision; the rest of a preset still holds.
    assert with_preset(UpscaleSettings(Path("a.onnx")), "memory") == UpscaleSettings(
        Path("a.onnx"), tile_batch=1, streams=1
    )
    assert with_preset(UpscaleSettings(Path("a.onnx")), "quality").margin_px == 32
    with pytest.raises(RedlineError, match="speed, balanced"):
        with_preset(UpscaleSettings(), "warp")


def test_a_texture_that_wraps_is_one_tile_with_what_stands_around_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by the size of the image alone, it was four tiles of that size."""
    monkeypatch.setattr(tile_choice, "measure_cost", lambda *_: TileCost(0, 1000.0))
    save(tmp_path / "a.png", 64, 64)
    settings = UpscaleSettings(weights, device="cpu", margin_px=4, ramp_px=4, images=ImageSettings(wrap=True))
    upscaling = Upscaling(settings)
    sizes = upscaling.planner.sizes_of([Task(tmp_path / "a.png", tmp_path / "b.png")])
    tiling, _ = upscaling.planner.choose(sizes)
    shape = tiling.shape_for((64, 64), wrap=True)
    assert len(cut_side(64, shape.rows, True).starts) == len(cut_side(64, shape.columns, True).starts) == 1
    assert shape.rows.tile == sizes[0][0] == 64 + 2 * shape.rows.around


def test_a_resumed_folder_with_other_pictures_has_tiles_of_its_own(weights: Path, tmp_path: Path) -> None:
    save(tmp_path / "in" / "icon.png", 8, 8)
    settings = UpscaleSettings(weights, device="cpu", workers=1, margin_px=4, ramp_px=4, resume=True)
    out = tmp_path / "out"
    sizes = []
    for _ in range(2):
        upscaling = Upscaling(settings)
        assert not any(o.error for o in upscaling.run(find_tasks([tmp_path / "in"], out, 2), out))
        assert upscaling.tile_runner is not None
        sizes.append(upscaling.tile_runner.tiling.sizes)
        save(tmp_path / "in" / "photo.png", 90, 120, seed=1)
    assert max(sizes[0]) < (120, 92) == max(sizes[1])


def test_a_preset_for_little_memory_obeys_a_limit() -> None:
    assert with_preset(UpscaleSettings(memory_bytes=10**9), "memory") == UpscaleSettings(
        memory_bytes=10**9, tile_batch=1, streams=1
    )
    with pytest.raises(RedlineError, match="max_pixels = 0 must be a whole number .at least 1."):
        UpscaleSettings(images=ImageSettings(max_pixels=0))


def test_a_folder_of_lying_and_upright_pictures_has_two_shapes_and_resumes_with_them(
    weights: Path, tmp_path: Path
) -> None:
    for index, (height, width) in enumerate([(31, 96), (96, 31), (30, 90), (90, 30)]):
        save(tmp_path / "in" / f"{index}.png", height, width, seed=index)
    out, said = tmp_path / "out", []
    tasks = find_tasks([tmp_path / "in"], out, 2)
    settings = UpscaleSettings(weights, device="cpu", workers=1, margin_px=4, ramp_px=4)
    first = Upscaling(settings, Listener(said.append))
    assert not any(o.error for o in first.run(tasks, out))
    assert "1 tile of 96 × 32 or 32 × 96 at a time" in said[0]
    assert first.tile_runner is not None and first.tile_runner.tiling.sizes == ((96, 32), (32, 96))
    assert Journal(out, first.made_as).tiles(tasks) == Tiles(((96, 32), (32, 96)), 1)
    before = tasks[3].target.read_bytes()
    for task in (tasks[1], tasks[3]):
        task.target.unlink()
    # Alone, the two that are left would be given one shape; the folder's are used again.
    resumed = Upscaling(replace(settings, resume=True))
    assert sum(o.skipped for o in resumed.run(tasks, out)) == 2
    assert tasks[3].target.read_bytes() == before
    assert resumed.tile_runner is not None and resumed.tile_runner.tiling == first.tile_runner.tiling


def test_what_is_compiled_gets_one_shape(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upscaling = Upscaling(UpscaleSettings(weights, device="cpu", margin_px=4, ramp_px=4))
    monkeypatch.setattr(tile_choice, "measure_cost", lambda *_: TileCost(0, 1000.0))
    sizes = ((96, 31), (31, 96))
    assert len(upscaling.planner.choose(sizes)[0].shapes) == 2
    planner = TilePlanner(upscaling.settings, upscaling.network, Plan.parse("compile"), "cpu")
    assert len(planner.choose(sizes)[0].shapes) == 1


@pytest.mark.parametrize(
    ("text", "tile"), [("auto", None), ("256", 256), ("256x384", (256, 384)), ("384x256", (384, 256))]
)
def test_what_a_tile_may_be_called(text: str, tile: object, weights: Path) -> None:
    assert _tile(text) == tile
    if tile is not None:
        upscaling = Upscaling(UpscaleSettings(weights, tile=_tile(text), tile_batch=1))
        tiling, _ = upscaling.planner.choose((), upscaling.planner.known_tiles(((1000, 1000),), None))
        assert tiling.sizes == ((tile, tile) if isinstance(tile, int) else tile,)


@pytest.mark.parametrize("tile", [512, 10**18, (10**18, 512)])
def test_a_tile_is_no_larger_than_the_largest_picture(tile: object, weights: Path, tmp_path: Path) -> None:
    """What lies beyond all of them would be computed for nothing, and a tile of any size would have to be filled."""
    save(tmp_path / "in" / "a.png", 130, 60)
    save(tmp_path / "in" / "b.png", 50, 101)
    upscaling = Upscaling(UpscaleSettings(weights, device="cpu", workers=1, tile=tile, tile_batch=1))
    assert not any(o.error for o in upscaling.run(find_tasks([tmp_path / "in"], tmp_path / "out", 2)))
    assert upscaling.tile_runner is not None and upscaling.tile_runner.tiling.sizes == ((104, 132),)


@pytest.mark.parametrize("tile", [1, 16, 20, 76, (76, 256), (256, 76)])
def test_a_tile_that_is_too_small_is_told_the_smallest_at_once(tile: object, weights: Path) -> None:
    """One sentence whatever it is too small for, and before anything is begun."""
    with pytest.raises(RedlineError, match=r"a tile of \d+ is too small: use 80 or more\.$"):
        Upscaling(UpscaleSettings(weights, tile=tile))
    assert Upscaling(UpscaleSettings(weights, tile=80)).planner.choose(((90, 90),), Tiles(((80, 80),)))[1] == 2


def test_the_batch_for_given_tiles_comes_from_the_memory(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does not fit into the memory that was asked for is refused, tile or batch."""
    monkeypatch.setattr(tile_choice, "measure_cost", lambda *_: TileCost(10_000, 1000.0))
    sizes, one = ((900, 100),), 10_000 + 1000 * 96**2

    def chosen(memory_bytes: int | None, batch: int | None = None) -> int:
        upscaling = Upscaling(UpscaleSettings(weights, tile=96, tile_batch=batch, memory_bytes=memory_bytes))
        return upscaling.planner.choose(sizes, upscaling.planner.known_tiles(sizes, None))[1]

    assert chosen(one) == 1 and chosen(2 * one) == 2 and chosen(None) > 2
    assert chosen(None, 3) == 3 and chosen(3 * one, 3) == 3
    with pytest.raises(RedlineError, match="of memory is not enough: a tile of 96 × 96 needs"):
        chosen(one - 1000)
    with pytest.raises(RedlineError, match="of memory is not enough: 3 tiles of 96 × 96 need"):
        chosen(2 * one, 3)
    # What is free is no promise: when it runs out, less is taken.
    monkeypatch.setattr(tile_choice, "memory_for_tiles", lambda _: 1000)
    assert chosen(None) == 1
    with pytest.raises(RedlineError, match="--tile-batch instead of --memory"):
        UpscaleSettings(Path("a.onnx"), memory_bytes=2**30)


def test_a_scale_that_the_weights_do_not_have_is_refused(weights: Path) -> None:
    assert Upscaling(UpscaleSettings(weights)).network.scale == 2
    assert Upscaling(UpscaleSettings(weights, scale=2)).network.scale == 2
    with pytest.raises(RedlineError, match=r"is for ×2, not ×4: leave out --scale\.$"):
        Upscaling(UpscaleSettings(weights, scale=4))
    with pytest.raises(RedlineError, match="no bundled model for ×7"):
        Upscaling(UpscaleSettings(scale=7))
    assert Upscaling(UpscaleSettings()).network.scale == 4


@pytest.mark.parametrize("text", ["x", "256x", "x256", "256x384x3", "-256", "256,384", "1.5x2"])
def test_what_is_no_tile(text: str) -> None:
    with pytest.raises(RedlineError, match="--tile must be auto, a whole number or a width"):
        _tile(text)


def test_resuming_skips_what_is_whole_and_only_that(weights: Path, tmp_path: Path) -> None:
    for index in range(4):
        save(tmp_path / "in" / f"{index}.png", seed=index)
    tasks, out = find_tasks([tmp_path / "in"], tmp_path / "out", 2), tmp_path / "out"
    settings = UpscaleSettings(weights, tile=32, margin_px=4, ramp_px=4)
    assert not any(o.error or o.skipped for o in Upscaling(settings).run(tasks, out))
    before = {task.target.name: task.target.read_bytes() for task in tasks}
    (out / "1.png").write_bytes(before["1.png"][:-20])  # as a full disk might leave it
    (out / "2.png").unlink()
    save(tmp_path / "in" / "3.png", seed=9)
    resumed = Upscaling(replace(settings, tile=None, resume=True)).run(tasks, out)
    assert sorted(o.task.source.name for o in resumed if o.skipped) == ["0.png"]
    # The first run's tile is used again, so that the pixels are the same.
    assert all((out / name).read_bytes() == before[name] for name in ("0.png", "1.png", "2.png"))
    assert (out / "3.png").read_bytes() != before["3.png"]
    other = Upscaling(replace(settings, resume=True, margin_px=5)).run(tasks, out)
    assert not any(o.skipped for o in other)


def test_a_kill_in_the_middle_leaves_nothing_half_and_a_resumed_run_finishes(weights: Path, tmp_path: Path) -> None:
    for index in range(6):
        save(tmp_path / "in" / f"{index}.png", 60, 70, seed=index)
    arguments = [sys.executable, "-m", "redline", "upscale", "in", "-o", "out", "-w", str(weights), "--device", "cpu"]
    arguments += ["--tile", "96"]
    with subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL) as child:
        journal = tmp_path / "out" / NAME
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.read_text()) and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    done = [json.loads(line)["target"] for line in journal.read_text().splitlines() if line.endswith("}")]
    assert done
    for path in (tmp_path / "out").iterdir():
        if not is_partial(path) and path.name != NAME:
            with Image.open(path) as image:
                image.load()
    tasks = find_tasks([tmp_path / "in"], tmp_path / "out", 2)
    settings = UpscaleSettings(weights, device="cpu", resume=True)
    outcomes = Upscaling(settings).run(tasks, tmp_path / "out")
    assert sum(o.skipped for o in outcomes) >= len(done) and not any(o.error for o in outcomes)
    assert not any(is_partial(path) for path in (tmp_path / "out").iterdir())
    calm = find_tasks([tmp_path / "in"], tmp_path / "calm", 2)
    Upscaling(UpscaleSettings(weights, device="cpu", tile=96)).run(calm)
    for one, other in zip(tasks, calm, strict=True):
        with Image.open(one.target) as first, Image.open(other.target) as second:
            assert np.array_equal(np.asarray(first), np.asarray(second))


def test_a_file_that_goes_while_the_others_are_done_is_reported(weights: Path, tmp_path: Path) -> None:
    for index in range(3):
        save(tmp_path / "in" / f"{index}.png", seed=index)
    tasks = find_tasks([tmp_path / "in"], tmp_path / "out", 2)
    tasks[1].source.unlink()
    settings = UpscaleSettings(weights, tile=32, margin_px=4, ramp_px=4)
    outcomes = Upscaling(settings).run(tasks, tmp_path / "out")
    assert [o.task.source.name for o in outcomes if o.error] == ["1.png"]
    assert sorted(p.name for p in (tmp_path / "out").glob("*.png")) == ["0.png", "2.png"]


@pytest.mark.parametrize("size", [(500, 375), (1024, 1024), (1920, 1080), (4000, 3000)])
def test_the_preset_for_speed_computes_less(size: tuple[int, int]) -> None:
    cost, computed = TileCost(0, 10_000.0), {}
    for preset in ("speed", "balanced", "quality"):
        settings = with_preset(UpscaleSettings(), preset)
        like = Cut(smallest_tile(settings.margin_px, settings.ramp_px, 16), settings.margin_px, settings.ramp_px, 16)
        tiling, batch = choose_tiles(cost, 2 * 2**30, like, [size])
        computed[preset] = tiling.shape_for(size).computed_pixels(size, batch)
    assert computed["speed"] <= computed["balanced"] <= computed["quality"]
