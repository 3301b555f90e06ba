"""How large tiles are, and how many go at once: from the memory that may be used and the measured cost of a tile.

What two neighbours share is computed twice, and so is what reaches beyond a picture's edge. Large tiles waste less of
the one and more of the other, so of those that fit the one is taken with which the pictures at hand cost least. The
batch follows in the same way: a last one that is not full is filled up. The cost in memory is measured on two small
tiles in fp32, eager: what a plan makes smaller stays in hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt

import torch

from redline.errors import RedlineError
from redline.memory import MemoryMonitor
from redline.quantities import format_bytes
from redline.resident import available_host_bytes, return_freed_memory
from redline.upscale.layout import Cut, cut_side, smallest_tile
from redline.upscale.network import Network

# From here on larger ones gain little; a GPU has the memory for more, and loses more with each batch it waits for.
_LARGEST_TILE = {"cpu": 512, "cuda": 1024}
_MOST_TILES, _MOST_PIXELS = 8, 8 * 512**2
_SHARE_OF_FREE = 0.8
_PROBES = (2, 4)  # in windows of the network


@dataclass(frozen=True)
class TileCost:
    """Peak bytes of one forward pass: `fixed`, and so many for each pixel of each tile in it."""

    fixed_bytes: int
    bytes_per_pixel: float

    def bytes(self, tile: int, batch: int = 1) -> int:
        return int(self.fixed_bytes + self.bytes_per_pixel * tile**2 * batch)


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
) -> tuple[Cut, int]:
    """The cut (`like` this one but for its tile) and the batch for pictures of these sizes that fit in the budget."""
    window, least = like.align, smallest_tile(like.margin, like.ramp, like.align)
    room = (budget_bytes - cost.fixed_bytes) / cost.bytes_per_pixel / (batch or 1)
    fits = isqrt(int(max(room, 0))) // window * window
    if fits < least:
        needed = format_bytes(cost.bytes(least, batch or 1))
        raise RedlineError(
            f"{format_bytes(budget_bytes)} are too little: the smallest tile, {least} × {least}, takes {needed}."
        )
    longest = ceil(max(max(size) for size in sizes) / window) * window
    largest = max(least, min(fits, _LARGEST_TILE[kind] // window * window, longest))
    cuts = [Cut(tile, like.margin, like.ramp, window) for tile in range(least, largest + 1, window)]
    cut = min(reversed(cuts), key=lambda cut: _computed_pixels(cut, 1, sizes))
    if batch is None:
        most = max(1, min(_MOST_TILES, int(room / cut.tile**2), _MOST_PIXELS // cut.tile**2))
        batch = min(range(most, 0, -1), key=lambda batch: _computed_pixels(cut, batch, sizes))
        # One that is never full would only be filled up.
        batch = min(batch, max(_count(width, cut) for width, _ in sizes))
    return cut, batch


def _computed_pixels(cut: Cut, batch: int, sizes: Sequence[tuple[int, int]]) -> int:
    """What the network sees of pictures of these sizes; a batch is filled from one row of tiles."""
    tiles = sum(_count(height, cut) * ceil(_count(width, cut) / batch) * batch for width, height in sizes)
    return tiles * cut.tile**2


def _count(length: int, cut: Cut) -> int:
    return len(cut_side(length, cut).starts)
