"""The assembled parts of an image have the same bytes as the result of one worker."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from redline.files.partial import is_partial
from redline.ladder.plan import Plan
from redline.upscale.image_run import ImageRun
from redline.upscale.network import Network
from redline.upscale.settings import ImageSettings, UpscaleSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Cut, TileShape, Tiling, cut_side
from redline.upscale.workers.split_image import Split, even_ranges, first_needed, is_large, split


class Smeared(nn.Module):
    """Depends on neighbouring pixels and the tile's edge, so a missing tile or another order changes the output.

    A weighted mean of 7 × 7 pixels, of single products and sums: a convolution may round differently in another batch.
    """

    def __init__(self) -> None:
        super().__init__()
        weights = torch.rand(7, 7, 12, 1, 1, generator=torch.Generator().manual_seed(5))
        self.weights = nn.Parameter(weights / weights.sum((0, 1)))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        padded, total = nn.functional.pad(x, (3, 3, 3, 3)).repeat_interleave(4, 1), torch.zeros(())
        for row in range(7):
            for column in range(7):
                seen = padded[..., row : row + height, column : column + width]
                total = total + self.weights[row, column] * seen
        return nn.functional.pixel_shuffle(total, 2)


def made(tiling: Tiling) -> TileRunner:
    return TileRunner(Network(Smeared(), 2, 4, "a planted network", "digest"), Plan(), "cpu", tiling, 2)


def tiles(*cuts: Cut) -> Tiling:
    """Returns square tiles, tiles with different cuts for rows and columns, and landscape and portrait ones."""
    return Tiling((TileShape(cuts[0], cuts[-1]), TileShape(cuts[-1], cuts[0])))


def in_parts(task: Task, count: int, tiling: Tiling, wrap: bool = False) -> tuple[Split, list[Outcome]]:
    settings = UpscaleSettings(images=ImageSettings(wrap=wrap), split_pixels=1)
    found = split(task, count, settings, tiling, 2)
    assert found is not None and is_partial(found.folder) and len(found.parts) == count
    # Runs the parts from last to first: no part depends on another.
    return found, [ImageRun(made(tiling), settings.images).run([part])[0] for part in reversed(found.parts)]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    ("shape", "kind", "tiling", "count"),
    [
        ((131, 37, 3), np.uint8, tiles(Cut(32, 4, 4, 4)), 2),
        ((150, 21), np.uint16, tiles(Cut(32, 4, 8, 4)), 3),
        ((90, 33, 4), np.uint8, tiles(Cut(20, 4, 4, 4)), 4),  # three tiles in a column
        ((131, 60, 3), np.uint8, tiles(Cut(24, 4, 4, 4), Cut(40, 4, 4, 4)), 2),
    ],
)
def test_assembled_parts_equal_the_result_of_one_worker(
    shape: tuple[int, ...], kind: type, tiling: Tiling, count: int, wrap: bool, tmp_path: Path
) -> None:
    samples = np.random.default_rng(sum(shape)).integers(0, np.iinfo(kind).max + 1, shape, dtype=kind)
    Image.fromarray(samples).save(tmp_path / "in.png", dpi=(72, 72))
    task, alone = Task(tmp_path / "in.png", tmp_path / "out" / "big.png"), Task(tmp_path / "in.png", tmp_path / "1.png")
    (expected,) = ImageRun(made(tiling), ImageSettings(wrap=wrap)).run([alone])
    found, outcomes = in_parts(task, count, tiling, wrap)
    assert not expected.error and not any(outcome.error for outcome in outcomes) and not task.target.exists()
    outcome = found.assemble(ImageSettings(wrap=wrap), 2)
    assert not outcome.error and (outcome.width, outcome.height) == (expected.width, expected.height)
    assert task.target.read_bytes() == alone.target.read_bytes()
    assert [path.name for path in task.target.parent.iterdir()] == ["big.png"]


def test_a_part_computes_no_unneeded_rows_of_tiles() -> None:
    for tile, margin, ramp in ((32, 4, 4), (20, 4, 4), (32, 4, 8), (64, 16, 4)):
        side = cut_side(301, Cut(tile, margin, ramp, 4))
        weights = side.weights(2)
        for first in range(1, len(side.starts)):
            begin = first_needed(side, first, 2)
            counts = [bool(weights[row, (side.starts[first] - side.starts[row]) * 2 :].any()) for row in range(first)]
            assert counts[begin:] == [True] * (first - begin) and not any(counts[:begin])
            assert begin >= first - 2
    assert even_ranges(7, 3) == [(0, 2), (2, 4), (4, 7)]


def test_which_images_are_not_split(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((131, 37, 3), np.uint8)).save(tmp_path / "in.png")
    task, cut = Task(tmp_path / "in.png", tmp_path / "out" / "big.png"), Cut(32, 4, 4, 4)
    rows = len(cut_side(131, cut).starts)
    assert not is_large(task, UpscaleSettings(split_pixels=131 * 37))
    assert is_large(task, UpscaleSettings(split_pixels=131 * 37 - 1))
    assert split(task, 2, UpscaleSettings(split_pixels=131 * 37), Tiling.square(cut), 2) is None
    assert (
        split(Task(tmp_path / "gone.png", task.target), 2, UpscaleSettings(split_pixels=1), Tiling.square(cut), 2)
        is None
    )
    most = split(task, 100, UpscaleSettings(split_pixels=1), Tiling.square(cut), 2)
    assert most is not None and len(most.parts) == rows // 2
    assert [(part.first, part.last) for part in most.parts] == even_ranges(rows, rows // 2)
    most.discard()
    assert not most.folder.exists()


def test_a_missing_part_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((131, 37, 3), np.uint8)).save(tmp_path / "in.png")
    cut, settings = Cut(32, 4, 4, 4), ImageSettings()
    task = Task(tmp_path / "in.png", tmp_path / "out" / "big.png")
    found, _ = in_parts(task, 2, Tiling.square(cut))
    found.parts[1].rows.write_bytes(found.parts[1].rows.read_bytes()[: 74 * 3 * 5])
    assert "rows were given" in found.assemble(settings, 2).error
    found, _ = in_parts(task, 2, Tiling.square(cut))
    shutil.rmtree(found.folder)
    assert found.assemble(settings, 2).error
    again = split(task, 2, UpscaleSettings(split_pixels=1), Tiling.square(cut), 2)
    assert again is not None
    shutil.rmtree(again.folder)
    (outcome,) = ImageRun(made(Tiling.square(cut)), settings).run(again.parts[:1])
    assert outcome.error.startswith("cannot write") and not list((tmp_path / "out").iterdir())
