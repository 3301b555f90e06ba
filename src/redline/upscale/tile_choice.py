"""How large tiles are, and how many go at once: from the memory that may be used and the measured cost of a tile.

Large tiles waste less: what two neighbours share is computed twice. So the tile comes first, up to a size from which
larger ones gain little, and what memory is left goes to the batch. The cost is measured on two small tiles in fp32,
eager: what a plan makes smaller stays in hand.
"""

from dataclasses import dataclass
from math import ceil, isqrt

import torch

from redline.errors import RedlineError
from redline.memory import MemoryMonitor
from redline.quantities import format_bytes
from redline.resident import available_host_bytes, return_freed_memory
from redline.upscale.layout import Cut, smallest_tile
from redline.upscale.network import Network

LARGEST_TILE = 512
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
    peaks = []
    for size in (step * probe for probe in _PROBES):
        return_freed_memory()
        with torch.no_grad(), MemoryMonitor(str(device)) as monitor:
            before = monitor.current_bytes
            module(torch.rand(1, 3, size, size, device=device))
            peaks.append((size**2, max(monitor.peak_bytes - before, 0)))
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
    cost: TileCost, budget_bytes: int, window: int, margin: int, ramp: int, largest_side: int, batch: int | None = None
) -> tuple[Cut, int]:
    """The cut and the batch that fit in the budget; a picture smaller than a tile needs no larger one."""
    least = smallest_tile(margin, ramp, window)
    room = (budget_bytes - cost.fixed_bytes) / cost.bytes_per_pixel / (batch or 1)
    fits = isqrt(int(max(room, 0))) // window * window
    if fits < least:
        needed = format_bytes(cost.bytes(least, batch or 1))
        raise RedlineError(
            f"{format_bytes(budget_bytes)} are too little: the smallest tile, {least} × {least}, takes {needed}."
        )
    wanted = max(least, min(LARGEST_TILE // window * window, ceil(largest_side / window) * window))
    cut = Cut(min(fits, wanted), margin, ramp, window)
    if batch is None:
        batch = max(1, min(8, int(room / cut.tile**2)))
    return cut, batch
