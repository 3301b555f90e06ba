"""Tiles: they cover, their weights sum to one exactly, and the result is what the whole image would have given."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.ladder.workloads.drct import draw
from redline.models.drct import Drct, DrctConfig
from redline.upscale.blend import Blender, enlarge_by_tiles
from redline.upscale.tiling import Cut, TileShape, Tiling, count_tiles, cut_side
from redline.video.padding_index import reflected, wrapped


def random_cut(rng: random.Random) -> Cut:
    align, margin, ramp = rng.choice([1, 4, 16]), rng.randint(0, 20), rng.randint(0, 20)
    least = (2 * margin + 3 * ramp + align) // align + 1
    return Cut(rng.randint(least, least + 20) * align, margin, ramp, align)


@pytest.mark.parametrize("seed", range(200))
def test_weights_sum_to_one_exactly_and_margins_count_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cut, scale = random_cut(rng), rng.choice([1, 2, 3, 4])
    side = cut_side(rng.randint(1, 1500), cut)
    weights = side.weights(scale)
    assert all(start % cut.align == 0 for start in side.starts)
    assert side.starts[0] == 0 and side.starts[-1] + cut.tile == side.padded >= side.length
    total = torch.zeros(side.padded * scale)
    for index, start in enumerate(side.starts):
        total[start * scale : (start + cut.tile) * scale] += weights[index]
        margin = cut.margin * scale
        assert index == 0 or not weights[index, :margin].any()
        assert index == len(side.starts) - 1 or not weights[index, weights.shape[1] - margin :].any()
    assert torch.equal(total, torch.ones_like(total))


def test_products_of_rows_and_columns_sum_to_one_exactly() -> None:
    side = cut_side(300, Cut(96, 8, 24, 16))
    weights = side.weights(3)
    total = torch.zeros(side.padded * 3, side.padded * 3)
    for row, top in enumerate(side.starts):
        for column, left in enumerate(side.starts):
            outer = weights[row][:, None] * weights[column][None, :]
            total[top * 3 : top * 3 + 288, left * 3 : left * 3 + 288] += outer
    assert torch.equal(total, torch.ones_like(total))


def test_no_more_tiles_than_needed() -> None:
    cut = Cut(64, 8, 8, 16)
    assert cut.overlap == 24 and cut.stride == 32
    assert cut_side(64, cut).starts == (0,) and cut_side(5, cut).starts == (0,)
    assert cut_side(65, cut).starts == (0, 16)
    assert cut_side(96, cut).starts == (0, 32) and cut_side(97, cut).starts == (0, 16, 48)


def test_cuts_that_cannot_be() -> None:
    for values, sentence in (
        ((60, 8, 8, 16), "multiple"),
        ((32, 12, 8, 16), "too small"),
        ((64, 4, 22, 1), "use 74 or more"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            Cut(*values)


def test_mirroring_goes_on_for_ever() -> None:
    assert reflected(-4, 8, 3).tolist() == [0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1]
    assert reflected(-2, 3, 1).tolist() == [0, 0, 0, 0, 0]
    assert wrapped(-4, 5, 3).tolist() == [2, 0, 1, 2, 0, 1, 2, 0, 1]


def test_counting_is_cutting() -> None:
    rng = random.Random(4)
    for _ in range(300):
        cut, length = random_cut(rng), rng.randint(1, 900)
        assert count_tiles(length, cut) == len(cut_side(length, cut).starts)


def test_a_picture_is_cut_by_the_shape_that_computes_least_of_it() -> None:
    wide, tall = (
        TileShape(Cut(rows, 16, 16, 16), Cut(columns, 16, 16, 16)) for rows, columns in ((96, 160), (160, 96))
    )
    tiling = Tiling((wide, tall))
    assert tiling.sizes == ((160, 96), (96, 160)) and str(tiling) == "160 × 96 or 96 × 160"
    assert wide.computed_pixels((160, 96)) == 160 * 96 and wide.computed_pixels((161, 97), 4) == 4 * 2 * 160 * 96
    assert tiling.shape_for((150, 90)) is wide and tiling.shape_for((90, 150)) is tall
    assert tiling.shape_for((30, 40)) is wide  # of equals the first, whatever else is in the folder


def squarish(cut: Cut, columns: int) -> TileShape:
    """Columns cut like the rows, but at another length."""
    return TileShape(cut, replace(cut, tile=columns))


class Nearby(nn.Module):
    """Enlarges twice; an output pixel depends on input pixels at most `reach` away, and on nothing else."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, padding_mode="zeros") for _ in range(reach)))
        self.last = nn.Conv2d(3, 12, 1)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pixel_shuffle(self.last(self.layers(x).tanh()), 2)


@pytest.mark.parametrize(("columns", "batch"), [(32, 1), (32, 3), (57, 1), (57, 3), (26, 2)])
@pytest.mark.parametrize(("height", "width"), [(77, 131), (40, 200), (130, 33)])
def test_tiled_equals_whole_for_a_model_whose_reach_is_inside_the_margin(
    height: int, width: int, columns: int, batch: int
) -> None:
    torch.manual_seed(height)
    model, shape, seen = Nearby(4), squarish(Cut(32, 4, 6), columns), set()

    def enlarge(tiles: Tensor) -> Tensor:
        seen.add(tuple(tiles.shape[-2:]))
        return model(tiles)

    image = torch.rand(2, 3, height, width)
    whole = model(image)
    tiled = enlarge_by_tiles(image, enlarge, 2, shape, batch)
    assert tiled.shape == whole.shape and seen == {(32, columns)}
    # At the image's own edge a tile may be padded where the whole image is not.
    inner = (..., slice(8, -8), slice(8, -8))
    torch.testing.assert_close(tiled[inner], whole[inner], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 70), (70, 1), (2, 3), (31, 32), (33, 5)])
def test_any_size_down_to_one_pixel(height: int, width: int) -> None:
    image = torch.rand(1, 3, height, width)
    nearest = lambda x: x.repeat_interleave(2, -1).repeat_interleave(2, -2)  # noqa: E731
    for wrap, columns in ((False, 32), (True, 32), (False, 44), (True, 28)):
        tiled = enlarge_by_tiles(image, nearest, 2, squarish(Cut(32, 4, 6, 4), columns), 2, wrap)
        torch.testing.assert_close(tiled, nearest(image), atol=1e-6, rtol=0)


@pytest.mark.parametrize("columns", [32, 50])
def test_a_wrapped_texture_has_no_seam_where_it_wraps(columns: int) -> None:
    torch.manual_seed(0)
    model, shape = Nearby(4), squarish(Cut(32, 4, 6), columns)
    texture = torch.rand(1, 3, 48, 60)
    tiled = enlarge_by_tiles(texture, model, 2, shape, 4, wrap=True)
    # The same texture, moved: its enlargement must be the enlargement, moved.
    moved = enlarge_by_tiles(texture.roll((11, 23), (2, 3)), model, 2, shape, 4, wrap=True)
    torch.testing.assert_close(moved, tiled.roll((22, 46), (2, 3)), atol=2e-6, rtol=0)
    mirrored = enlarge_by_tiles(texture, model, 2, shape, 4)
    assert (mirrored - tiled).abs().max() > 1e-3


def test_no_seam_where_tiles_meet() -> None:
    """A model that sees further than the margin; and one that is brighter where its tile is, which a hard cut shows."""
    torch.manual_seed(1)
    model = draw(Drct(DrctConfig.of(2, 1, width=24, growth=8, features=8, window=4))).eval()
    ramp = torch.linspace(0, 1, 120)
    image = torch.stack([ramp[None, :] * ramp[:, None]] * 3)[None] + 0.05 * torch.rand(1, 3, 120, 120)
    with torch.no_grad():
        whole = model(image)

    def seam(cut: Cut, enlarge: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """How much a column differs from the one before it beyond what it does in the whole image: the most around
        the middle of what two tiles share, where they meet, and in how many times that of an average column."""
        with torch.no_grad():
            error = enlarge_by_tiles(image, enlarge, 2, TileShape(cut, cut), 4) - whole
        steps = (error[..., 1:] - error[..., :-1]).abs().mean((0, 1, 2))
        starts = cut_side(120, cut).starts
        meet = [first + second + cut.tile - 1 for first, second in zip(starts, starts[1:], strict=False)]
        near = sorted({at for middle in meet for at in range(middle - cut.ramp, middle + cut.ramp + 1)})
        elsewhere = [at for at in range(20, 219) if at not in near]
        return float(steps[near].max()), float(steps[meet].mean() / steps[elsewhere].mean())

    def uneven(x: Tensor) -> Tensor:
        return model(x) + 0.02 * x.mean((1, 2, 3), keepdim=True)

    visible = 1 / 255 / 4  # of what 8 bits can show, along a whole column
    step, times = seam(Cut(48, 8, 8, 4), model)
    assert step < visible / 2 and times < 10
    step, times = seam(Cut(48, 8, 8, 4), uneven)
    assert step < visible / 2 and times < 50
    step, times = seam(Cut(48, 12, 0, 4), uneven)  # the same overlap without the fading
    assert step > visible and times > 100


def test_strips_are_no_wider_than_a_tile_and_cover_every_column_once() -> None:
    """So that no sums of a wide image's whole row of tiles are ever held."""
    rows, columns = cut_side(40, Cut(32, 4, 4, 4)), cut_side(501, Cut(32, 4, 4, 4))
    blender, end, carried = Blender(rows, columns, 2), 0, []
    for row in range(len(rows.starts)):
        end = 0
        for across, strip in blender.blend(row, (torch.ones(1, 3, 64, 64) for _ in columns.starts)):
            assert across.start == end and strip.shape[-1] == across.stop - across.start <= 64
            assert strip.shape[-2] == blender.finished_rows(row) and (strip == 1).all()
            end = across.stop
        assert end == 2 * columns.padded
        carried.append(0 if blender.carried is None else blender.carried.shape[-2])
    assert carried[-1] == 0 and 0 < max(carried) < 64
