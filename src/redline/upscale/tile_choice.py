"""How large tiles are, and how many go at once: from the memory that may be used and the measured cost of a tile.

What two neighbours share is computed twice, and so is what reaches beyond a picture's edge. Large tiles waste less of
the one and more of the other, so of those that fit the one is taken with which the pictures at hand cost least, its
width and its height chosen apart. Upright pictures get a shape of their own beside that of the others where this saves
enough. The batch follows in the same way: a last one that is not full is filled up. The cost in memory is measured on
two small tiles in fp32, eager: what a plan makes smaller stays in hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt

import numpy as np
import torch

from redline.errors import RedlineError
from redline.memory import MemoryMonitor
from redline.quantities import format_bytes
from redline.resident import available_host_bytes, return_freed_memory
from redline.upscale.layout import Cut, TileShape, Tiling, count_tiles, smallest_tile
from redline.upscale.network import Network

# From here on larger ones gain little; a GPU has the memory for more, and loses more with each batch it waits for.
_LARGEST_TILE_PIXELS = {"cpu": 512**2, "cuda": 1280 * 1024}
# The share of the pixels of one shape that two must save to be worth a second graph.
_WORTH_A_SHAPE = 0.05
_MOST_TILES, _MOST_PIXELS = 8, 8 * 512**2
_SHARE_OF_FREE = 0.8
_PROBES = (2, 4)  # in windows of the network


@dataclass(frozen=True)
class TileCost:
    """Peak bytes of one forward pass: `fixed`, and so many for each pixel in it."""

    fixed_bytes: int
    bytes_per_pixel: float

    def bytes(self, pixels: int) -> int:
        return int(self.fixed_bytes + self.bytes_per_pixel * pixels)


def measure_cost(network: Network, device: torch.device | str) -> TileCost:
    """Runs two tiles of different sizes and takes the line through their peaks."""
    step = max(network.window, 16)
    module = network.module.to(device)
    if torch.device(device).type == "cuda":
        # What libraries keep from their first call on would count for the first tile alone.
        with torch.no_grad():
            module(torch.rand(1, 3, step, step, device=device))
    peaks = []
    for size in (step * probe for probe in _PROBES):
        return_freed_memory()
        with torch.no_grad(), MemoryMonitor(str(device)) as monitor:
            before = monitor.current_bytes
            module(torch.rand(1, 3, size, size, device=device))
            peaks.append((size**2, max(monitor.peak_bytes - before, 0)))
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # other workers may look for what is free
    (small, low), (large, high) = peaks
    # The enlarged picture, in and out, is a floor that a coarse reading must not fall below.
    least = 4 * 3 * (1 + 2 * network.scale**2)
    per_pixel = max((high - low) / (large - small), least)
    return TileCost(max(0, int(low - per_pixel * small)), per_pixel)


def memory_for_tiles(device: torch.device | str) -> int:
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()
    return int(free * _SHARE_OF_FREE)


def choose_tiles(
    cost: TileCost,
    budget_bytes: int,
    like: Cut,
    sizes: Sequence[tuple[int, int]],
    batch: int | None = None,
    kind: str = "cpu",
    most_shapes: int = 2,
) -> tuple[Tiling, int]:
    """The tiles (cut `like` this but for their length) and the batch for such pictures that fit in the budget."""
    least = smallest_tile(like.margin, like.ramp, like.align)
    room = int(max(budget_bytes - cost.fixed_bytes, 0) / cost.bytes_per_pixel) // (batch or 1)
    if room < least**2:
        needed = format_bytes(cost.bytes(least**2 * (batch or 1)))
        raise RedlineError(
            f"{format_bytes(budget_bytes)} are too little: the smallest tile, {least} × {least}, takes {needed}."
        )
    most_pixels = max(least**2, min(room, _LARGEST_TILE_PIXELS[kind]))
    tiling = Tiling((_best_shape(like, most_pixels, sizes, batch or 1),))
    upright = [(width, height) for width, height in sizes if height > width]
    others = [(width, height) for width, height in sizes if height <= width]
    if most_shapes > 1 and upright and others:
        both = Tiling(tuple(_best_shape(like, most_pixels, group, batch or 1) for group in (others, upright)))
        whole = _computed_pixels(tiling, batch or 1, sizes)
        if _computed_pixels(both, batch or 1, sizes) <= (1 - _WORTH_A_SHAPE) * whole:
            tiling = both
    return tiling, batch or choose_batch(cost, budget_bytes, tiling, sizes)


def choose_batch(
    cost: TileCost,
    budget_bytes: int,
    tiling: Tiling,
    sizes: Sequence[tuple[int, int]],
    batch: int | None = None,
    refuse: bool = False,
) -> int:
    """How many tiles at a time, `batch` if given; what does not fit in the budget may be refused."""
    largest = tiling.largest.pixels
    needed = cost.bytes(largest * (batch or 1))
    if refuse and needed > budget_bytes:
        tiles = f"{batch} tiles of {tiling.largest} take" if (batch or 1) > 1 else f"a tile of {tiling.largest} takes"
        raise RedlineError(f"{format_bytes(budget_bytes)} are too little: {tiles} {format_bytes(needed)}.")
    if batch:
        return batch
    room = int(max(budget_bytes - cost.fixed_bytes, 0) / cost.bytes_per_pixel)
    most = max(1, min(_MOST_TILES, room // largest, _MOST_PIXELS // largest))
    batch = min(range(most, 0, -1), key=lambda batch: _computed_pixels(tiling, batch, sizes))
    # One that is never full would only be filled up.
    return min(batch, max(count_tiles(size[0], tiling.shape_for(size).columns) for size in sizes))


def _best_shape(like: Cut, most_pixels: int, sizes: Sequence[tuple[int, int]], batch: int) -> TileShape:
    """Of all widths and heights at once; of equals the one that makes fewest tiles, and of these the squarest."""
    least, step = smallest_tile(like.margin, like.ramp, like.align), like.align
    counts: list[np.ndarray] = []
    sides: list[np.ndarray] = []
    for lengths in zip(*sizes, strict=True):
        longest = min(ceil(max(lengths) / step) * step, 2 * isqrt(most_pixels) // step * step)
        sides.append(np.arange(least, max(least, longest) + 1, step, dtype=np.int64))
        cuts = [replace(like, tile=int(tile)) for tile in sides[-1]]
        counts.append(np.array([[count_tiles(length, cut) for length in lengths] for cut in cuts], dtype=np.int64))
    (widths, heights), (columns, rows) = sides, counts
    tiles = rows @ (-(-columns // batch) * batch).T
    pixels = heights[:, None] * widths[None, :]
    computed = np.where(pixels <= most_pixels, tiles * pixels, np.iinfo(np.int64).max)
    equals = np.argwhere(computed == computed.min())
    row, column = min(equals, key=lambda at: (tiles[tuple(at)], abs(heights[at[0]] - widths[at[1]])))
    return TileShape(replace(like, tile=int(heights[row])), replace(like, tile=int(widths[column])))


def _computed_pixels(tiling: Tiling, batch: int, sizes: Sequence[tuple[int, int]]) -> int:
    return sum(tiling.shape_for(size).computed_pixels(size, batch) for size in sizes)
