"""The cost of a tile, and how many go at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.errors import RedlineError
from redline.upscale import tile_choice
from redline.upscale.tile_choice import TileCost, choose_tiles, measure_cost, memory_for_tiles, with_batch
from redline.upscale.tiling import Cut, TileShape, Tiling

COST = TileCost(1000, 2.0)
LIKE = Cut(64, 4, 4, 4)


def tiling(*sizes: tuple[int, int]) -> Tiling:
    return Tiling(tuple(TileShape(Cut(rows, 4, 4, 4), Cut(columns, 4, 4, 4)) for columns, rows in sizes))


def test_a_cost_is_a_line_through_two_measured_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 and 64 pixels a side here, which take 10 bytes a pixel more than 5,000, and a CPU keeps 40% in pieces."""
    seen: list[int] = []

    class Monitor:
        def __init__(self, device: str) -> None:
            self.current_bytes = 100

        def __enter__(self) -> "Monitor":
            return self

        def __exit__(self, *_: object) -> None: ...

        @property
        def peak_bytes(self) -> int:
            return 100 + 5000 + 1000 * seen[-1]

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            seen.append(x.shape[-1] * x.shape[-2])

    monkeypatch.setattr(tile_choice, "MemoryMonitor", Monitor)
    network: Any = SimpleNamespace(window=8, scale=2, module=Module())
    cost = measure_cost(network, "cpu")
    assert seen == [32**2, 64**2]
    assert cost.bytes_per_pixel == pytest.approx(1400.0) and cost.fixed_bytes == 0
    network = SimpleNamespace(window=24, scale=10, module=Module())
    assert measure_cost(network, "cpu").bytes_per_pixel == pytest.approx(1.4 * 12 * 201) and seen[2:] == [48**2, 96**2]


def test_four_fifths_of_what_is_free_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_choice, "available_host_bytes", lambda: 1000)
    assert memory_for_tiles("cpu") == 800


def test_the_smallest_tile_that_fits_is_taken_and_less_memory_is_refused() -> None:
    least = 20  # twice the margin, the ramp, and what is left of it
    needed = COST.bytes(least**2)
    shape = choose_tiles(COST, needed, LIKE, [(500, 300)])[0].largest
    assert shape.size == (least, least)
    with pytest.raises(RedlineError, match="the smallest tile, 20 × 20, needs 1.76 KiB"):
        choose_tiles(COST, needed - 2, LIKE, [(500, 300)])
    with pytest.raises(RedlineError, match="needs 2.54 KiB"):
        choose_tiles(COST, needed, LIKE, [(500, 300)], batch=2)


def test_a_given_batch_may_be_refused() -> None:
    one = tiling((32, 32))
    needed = COST.bytes(3 * 32 * 32)
    assert with_batch(COST, needed, one, [(100, 100)], 3, refuse=True)[1] == 3
    with pytest.raises(RedlineError, match="3 tiles of 32 × 32 need"):
        with_batch(COST, needed - 1, one, [(100, 100)], 3, refuse=True)
    with pytest.raises(RedlineError, match="a tile of 32 × 32 needs"):
        with_batch(COST, 100, one, [(100, 100)], refuse=True)
    assert with_batch(COST, 100, one, [(100, 100)], 3)[1] == 3


@pytest.mark.parametrize(("tiles", "batch"), [(1, 1), (3, 3), (100, 8)])
def test_the_batch_follows_from_the_memory(tiles: int, batch: int) -> None:
    found, chosen = with_batch(COST, COST.bytes(tiles * 32 * 32), tiling((32, 32)), [(1000, 1000)])
    assert chosen == batch and found.filled_to == 1


def test_a_batch_is_no_larger_than_a_row_of_tiles_and_wastes_nothing() -> None:
    plenty = COST.bytes(10**6)
    assert with_batch(COST, plenty, tiling((32, 32)), [(40, 1000)])[1] == 2
    # Five tiles in a row: batches of five fill up nothing, where eight or four would.
    found, chosen = with_batch(COST, plenty, tiling((32, 32)), [(112, 1000)], fills=True)
    assert chosen == found.filled_to == 5
