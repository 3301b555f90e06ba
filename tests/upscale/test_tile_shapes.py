"""Which tile shapes are chosen for which images, from a memory budget and the measured cost of a tile."""

import random
import time

import pytest

from redline.errors import RedlineError
from redline.upscale.tile_choice import MOST_SHAPES, ShapeLimits, TileCost, choose_tiles
from redline.upscale.tiling import Cut, TileShape, Tiling, cut_side


def tiles(*sizes: tuple[int, int]) -> Tiling:
    return Tiling(tuple(TileShape(Cut(height, 16, 16, 16), Cut(width, 16, 16, 16)) for width, height in sizes))


def test_tiles_from_a_budget() -> None:
    cost, like, large = TileCost(10_000_000, 1000.0), Cut(80, 16, 16, 16), [(10**5, 10**5)]
    assert choose_tiles(cost, 10**12, like, large) == (tiles((512, 512)), 8)
    (larger,) = choose_tiles(cost, 10**12, like, large, kind="cuda")[0].shapes
    assert 1024 * 1024 < larger.pixels <= 1280 * 1024
    assert choose_tiles(cost, 10**12, like, [(100, 70)]) == (tiles((112, 80)), 1)
    budget = 10_000_000 + 1000 * 130**2
    small, one = choose_tiles(cost, budget, like, large)
    assert (small, one) == (tiles((128, 128)), 1) and cost.bytes(small.largest.pixels) <= budget
    assert choose_tiles(cost, 10_000_000 + 4000 * 130**2, like, large, batch=4)[0] == tiles((128, 128))
    # Of a strip there is nothing to gain from height, so that memory goes into width.
    strip, one = choose_tiles(cost, budget, like, [(2000, 60)])
    assert strip == tiles((192, 80)) and cost.bytes(192 * 80) <= budget
    with pytest.raises(RedlineError, match="not enough: the smallest tile, 80 × 80"):
        choose_tiles(cost, 11_000_000, like, large)


def computed(tiling: Tiling, *sizes: tuple[int, int]) -> int:
    """By cutting the images, not by counting."""
    total, batch = 0, tiling.filled_to
    for size in sizes:

        def of(shape: TileShape, size: tuple[int, int] = size) -> int:
            columns, rows = (
                len(cut_side(*side).starts) for side in zip(size, (shape.columns, shape.rows), strict=True)
            )
            return -(-columns // batch) * batch * rows * shape.columns.tile * shape.rows.tile

        assert of(tiling.shape_for(size)) == min(map(of, tiling.shapes))
        total += of(tiling.shape_for(size))
    return total


def test_tiles_waste_little_of_the_pictures_at_hand() -> None:
    cost, like = TileCost(0, 1000.0), Cut(80, 16, 16, 16)
    rng = random.Random(5)
    sides = range(80, 1025, 16)
    for _ in range(5):
        size = rng.randint(300, 3000), rng.randint(300, 3000)
        tiling, batch = choose_tiles(cost, 10**12, like, [size])
        others = [tiles((width, height)) for width in sides for height in sides if width * height <= 512**2]
        assert computed(tiling, size) == min(other.shapes[0].computed_pixels(size) for other in others) and batch > 1
    # With tiles of 512, images of 1,000 × 1,000 would be nine of them, 2.4 times the image.
    assert choose_tiles(cost, 10**12, like, [(1000, 1000)], kind="cuda") == (tiles((1008, 1008)), 1)
    assert computed(choose_tiles(cost, 10**12, like, [(1000, 1000)])[0], (1000, 1000)) < 1.2e6


def test_which_share_of_what_is_computed_is_of_use() -> None:
    """Photos of one megapixel: square tiles as large as 1,024 reached 83% for 3:2 alone, and 77% for a mixed folder."""
    cost, like = TileCost(0, 1000.0), Cut(80, 16, 16, 16)
    lying, upright, four_to_three = (1224, 816), (816, 1224), (1152, 864)

    def useful(tiling: Tiling, sizes: list[tuple[int, int]]) -> float:
        return sum(width * height for width, height in sizes) / computed(tiling, *sizes)

    def squares(sizes: list[tuple[int, int]]) -> float:
        return max(useful(tiles((side, side)), sizes) for side in range(80, 1025, 16))

    for sizes, kind, before, after in (
        ([lying], "cuda", 0.829, 0.994),
        ([lying, upright], "cuda", 0.829, 0.994),
        ([lying, upright, four_to_three], "cuda", 0.772, 0.996),
        ([lying], "cpu", 0.829, 0.860),
        ([four_to_three], "cpu", 0.771, 0.859),
    ):
        assert squares(sizes) == pytest.approx(before, abs=1e-3)
        assert useful(choose_tiles(cost, 10**12, like, sizes, kind=kind)[0], sizes) == pytest.approx(after, abs=1e-3)


def test_pictures_of_another_form_have_a_shape_of_their_own_where_it_is_worth_one() -> None:
    cost, like, mixed = TileCost(0, 1000.0), Cut(80, 16, 16, 16), [(1224, 816), (816, 1224)]

    def chosen(sizes: list[tuple[int, int]], most: int = MOST_SHAPES, passes: int = 0) -> Tiling:
        return choose_tiles(cost, 10**12, like, sizes, None, "cuda", ShapeLimits(most, passes))[0]

    assert chosen(mixed) == tiles((1232, 816), (816, 1232))
    assert len(chosen(mixed, most=1).shapes) == 1
    assert len(chosen([(10**5, 10**5), (10**5, 10**5 + 1)]).shapes) == 1
    # Two photos do not pay for three passes to record a graph; a hundred do.
    assert len(chosen(mixed, passes=3).shapes) == 1
    assert chosen(mixed * 50, passes=3) == chosen(mixed)
    # Small ones among large ones of the same form; what a form has is no more than the window's rounding.
    assert chosen([(1200, 800)] * 20 + [(300, 200)] * 200, passes=3) == tiles((1200, 800), (304, 208))
    forms = [(1333, 750), (1225, 816), (1155, 866), (1265, 790), (816, 1225)]
    assert computed(chosen(forms * 40, passes=3), *forms) < 1.03 * sum(w * h for w, h in forms)
    # A whole folder of them, each a little different.
    rng = random.Random(2)
    folder = [(rng.randint(700, 1300), rng.randint(700, 1300)) for _ in range(256)]
    tiling = chosen(folder, passes=3)
    assert 2 < len(tiling.shapes) <= 6
    assert computed(tiling, *folder) < 0.9 * computed(chosen(folder, most=1), *folder)


def test_what_is_filled_up_counts_where_it_is_filled_up() -> None:
    cost, like, sizes = TileCost(0, 1000.0), Cut(80, 16, 16, 16), [(1333, 750), (1225, 816), (816, 1225)] * 20
    for batch in (2, 4, 8):
        filled, _ = choose_tiles(cost, 10**12, like, sizes, batch, "cuda", ShapeLimits(fills=True))
        assert filled.filled_to == batch
        assert computed(filled, *sizes) < 1.4 * sum(width * height for width, height in sizes)
        plain, _ = choose_tiles(cost, 10**12, like, sizes, batch, "cuda")
        assert plain == choose_tiles(cost, 10**12, like, sizes, None, "cuda")[0] and plain.filled_to == 1


def test_a_network_without_a_window_has_as_few_tiles_to_choose_from() -> None:
    """Every length may be a tile's: 106 seconds for such a folder when all of them were looked at."""
    cost, like, rng = TileCost(0, 1000.0), Cut(80, 16, 16, 1), random.Random(3)
    folder = [(rng.randint(300, 3000), rng.randint(300, 3000)) for _ in range(256)]
    started = time.perf_counter()
    tiling, _ = choose_tiles(cost, 10**12, like, folder, kind="cuda", limits=ShapeLimits(passes=3))
    assert time.perf_counter() - started < 20
    assert computed(tiling, *folder) < 1.35 * sum(width * height for width, height in folder)
    assert choose_tiles(cost, 10**12, like, [(333, 257)], kind="cuda")[0].sizes == ((333, 257),)
