"""Chooses tile shapes and the batch size from the available memory and the measured memory use of a tile.

The network computes overlaps twice, and computes padding beyond the edge of an image. Large tiles waste less on
overlaps and more on padding. The chosen shape fits in memory and needs the fewest computed pixels for the given images;
its width and height are chosen independently. Images of another aspect ratio get a separate shape if that saves more
than capturing another CUDA graph costs. If incomplete batches are padded to full ones, the batch size is chosen in the
same way. The memory use is measured on two small tiles in eager fp32; memory that a plan saves is left as a reserve.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, isqrt

import numpy as np
import torch

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.machine.host_memory import available_host_bytes, return_freed_memory
from redline.machine.memory import MemoryMonitor
from redline.notation import format_bytes
from redline.upscale.images.source import open_image
from redline.upscale.network import Network
from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings
from redline.upscale.tasks import Task
from redline.upscale.tiling import Cut, TileShape, Tiling, count_tiles, padded_size, smallest_tile
from redline.upscale.video.probe import probe

# The maximum number of pixels of a tile; larger tiles would save little. The limit is higher on a GPU, because a GPU
# has more memory than a CPU and loses more time with each batch.
_LARGEST_TILE_PIXELS = {"cpu": 512**2, "cuda": 1280 * 1024}
MOST_SHAPES = 6
# The share of all pixels that an additional shape must save; a smaller gain is lost in timing noise.
_WORTH_A_SHAPE = 0.01
# The candidates for a tile side: lengths in steps of `_STEP_PX`, and the `_MOST_LENGTHS` most common image sides.
_STEP_PX, _MOST_LENGTHS = 16, 64
# A group of images may be split by aspect ratio, width or height; for each of these, up to `_MOST_SPLITS` thresholds
# are tried.
_ORDERS: tuple[Callable[[tuple[int, int]], float], ...] = (lambda s: s[0] / s[1], lambda s: s[0], lambda s: s[1])
_MOST_SPLITS = 16
_MOST_TILES, _MOST_PIXELS = 8, 8 * 512**2
_SHARE_OF_FREE = 0.8
_PROBES = (2, 4)  # sides of the measured tiles, as multiples of the network's window
# The factor by which fragmentation raises the peak: on a CPU, freed memory does not always fit the next layer
# (measured: 1.24 to 1.35).
_FRAGMENTATION = {"cpu": 1.4, "cuda": 1.0}
Sizes = tuple[tuple[int, int], ...]

_UNREADABLE_SIDE_PX = 100_000
# How many images and videos are opened to find out their sizes.
_MOST_READ = 256


@dataclass(frozen=True)
class TileCost:
    """The peak memory of one forward pass: a fixed part, and a part per pixel."""

    fixed_bytes: int
    bytes_per_pixel: float

    def bytes(self, pixels: int) -> int:
        return int(self.fixed_bytes + self.bytes_per_pixel * pixels)


@dataclass(frozen=True)
class ShapeLimits:
    """What a plan allows: how many tile shapes, the warm-up passes for each, and whether batches are filled up."""

    most: int = MOST_SHAPES
    passes: int = 0
    fills: bool = False


_UNLIMITED = ShapeLimits()


def measure_cost(network: Network, device: torch.device | str) -> TileCost:
    """Measures the peak memory of two tiles of different sizes and fits a line through the two values."""
    step = max(network.window, 16)
    module = network.module.to(device)
    if torch.device(device).type == "cuda":
        # The first call allocates library workspaces, which would otherwise count for the first tile alone.
        with torch.no_grad():
            module(torch.rand(1, 3, step, step, device=device))
    peaks = []
    for size in (step * windows for windows in _PROBES):
        return_freed_memory()
        with torch.no_grad(), MemoryMonitor(str(device)) as monitor:
            before = monitor.current_bytes
            module(torch.rand(1, 3, size, size, device=device))
            peaks.append((size**2, max(monitor.peak_bytes - before, 0)))
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # other workers may query the free memory
    (small, low), (large, high) = peaks
    # A coarse measurement may be too low, so a pixel is assumed to need at least the bytes of its input and output.
    least = 4 * 3 * (1 + 2 * network.scale**2)
    per_pixel = max((high - low) / (large - small), least) * _FRAGMENTATION[torch.device(device).type]
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
    limits: ShapeLimits = _UNLIMITED,
) -> tuple[Tiling, int]:
    """Returns the tiling and the batch size for images of these sizes. `like` sets their margin, ramp and alignment."""
    least = smallest_tile(like.margin, like.ramp, like.align)
    fitting_pixels = int(max(budget_bytes - cost.fixed_bytes, 0) / cost.bytes_per_pixel) // (batch or 1)
    if fitting_pixels < least**2:
        needed = format_bytes(cost.bytes(least**2 * (batch or 1)))
        raise RedlineError(
            f"{format_bytes(budget_bytes)} of memory is not enough: the smallest tile, {least} × {least}, needs "
            f"{needed}."
        )
    most_pixels = max(least**2, min(fitting_pixels, _LARGEST_TILE_PIXELS[kind]))
    filled_to = batch if batch and limits.fills else 1
    tiling = Tiling(_ShapeSearch(like, most_pixels, sizes, filled_to, limits.passes).shapes(limits.most), filled_to)
    return with_batch(cost, budget_bytes, tiling, sizes, batch, limits.fills)


def with_batch(
    cost: TileCost,
    budget_bytes: int,
    tiling: Tiling,
    sizes: Sequence[tuple[int, int]],
    batch: int | None = None,
    fills: bool = False,
    refuse: bool = False,
) -> tuple[Tiling, int]:
    """Returns the tiling and the batch size (`batch` if given). With `refuse`, raises if they exceed the budget."""
    largest = tiling.largest.pixels
    needed = cost.bytes(largest * (batch or 1))
    if refuse and needed > budget_bytes:
        tiles = f"{batch} tiles of {tiling.largest} need" if (batch or 1) > 1 else f"a tile of {tiling.largest} needs"
        raise RedlineError(f"{format_bytes(budget_bytes)} of memory is not enough: {tiles} {format_bytes(needed)}.")
    if batch is None:
        fitting_pixels = int(max(budget_bytes - cost.fixed_bytes, 0) / cost.bytes_per_pixel)
        most = max(1, min(_MOST_TILES, fitting_pixels // largest, _MOST_PIXELS // largest))
        filled = {batch: replace(tiling, filled_to=batch if fills else 1) for batch in range(most, 0, -1)}
        batch = min(filled, key=lambda batch: filled[batch].computed_pixels(sizes))
        # A batch has tiles of one row only, so a batch larger than the longest row would never be full.
        batch = min(batch, max(count_tiles(size[0], filled[batch].shape_for(size).columns) for size in sizes))
    return replace(tiling, filled_to=batch if fills else 1), batch


@dataclass(frozen=True)
class _Group:
    """Images (by index) that share a tile shape, and how many pixels are computed for them and for graph capture."""

    members: tuple[int, ...]
    shape: TileShape
    pixels: int


class _ShapeSearch:
    """Finds the best shapes for the images; evaluates all candidate widths and heights at once."""

    def __init__(
        self, like: Cut, most_pixels: int, sizes: Sequence[tuple[int, int]], filled_to: int, passes: int
    ) -> None:
        self.like, self.sizes = like, sizes
        columns, self._widths = _counts(like, most_pixels, [width for width, _ in sizes])
        rows, self._heights = _counts(like, most_pixels, [height for _, height in sizes])
        # In floating point, which makes matrix products faster; the counts are whole numbers, so they stay exact.
        self._rows, self._columns = rows.astype(np.float64), (-(-columns // filled_to) * filled_to).astype(np.float64)
        pixels = self._heights[:, None] * self._widths[None, :]
        self._pixels = np.where(pixels <= most_pixels, pixels.astype(np.float64), np.inf)
        self._capture_pixels = passes * filled_to

    def shapes(self, most: int) -> tuple[TileShape, ...]:
        """Returns at most `most` shapes: the best shape for each group of images.

        Starts with one group of all images. Then repeatedly splits the group whose split saves the most pixels, until
        no split saves enough to be worth an additional shape.
        """
        groups = [self._group(range(len(self.sizes)))]
        worth = _WORTH_A_SHAPE * groups[0].pixels
        split_groups: dict[_Group, tuple[_Group, _Group] | None] = {}
        while len(groups) < most:
            for group in groups:
                if group not in split_groups:
                    split_groups[group] = min(self._splits(group), key=_pixels, default=None)
            savings = [(group.pixels - _pixels(two), group) for group in groups if (two := split_groups[group])]
            saved, group = max(savings, key=lambda saving: saving[0], default=(0, groups[0]))
            two = split_groups[group]
            if two is None or saved < worth:
                break
            groups.remove(group)
            groups.extend(two)
        shapes = {group.shape for group in groups}
        return tuple(sorted(shapes, key=lambda shape: (-shape.columns.tile / shape.rows.tile, -shape.pixels)))

    def _group(self, members: Sequence[int]) -> _Group:
        """Returns the group with its best shape; ties go to fewer tiles, then to the most square shape."""
        chosen = list(members)
        tiles = self._rows[:, chosen] @ self._columns[:, chosen].T
        computed = tiles * self._pixels
        equals = np.argwhere(computed == computed.min())
        squareness = np.abs(self._heights[:, None] - self._widths[None, :])
        row, column = min(equals, key=lambda at: (tiles[tuple(at)], squareness[tuple(at)]))
        cuts = (replace(self.like, tile=int(side)) for side in (self._heights[row], self._widths[column]))
        shape = TileShape(*cuts)
        return _Group(tuple(members), shape, int(computed[row, column]) + self._capture_pixels * shape.pixels)

    def _splits(self, group: _Group) -> Iterator[tuple[_Group, _Group]]:
        for order in _ORDERS:
            place = {member: order(self.sizes[member]) for member in group.members}
            values = sorted(set(place.values()))[1:]
            for index in range(min(len(values), _MOST_SPLITS)):
                value = values[index * len(values) // min(len(values), _MOST_SPLITS)]
                below = [member for member in group.members if place[member] < value]
                yield self._group(below), self._group([member for member in group.members if place[member] >= value])


def _pixels(groups: tuple[_Group, _Group]) -> int:
    return groups[0].pixels + groups[1].pixels


def _counts(like: Cut, most_pixels: int, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tiles of each candidate length cover each of `lengths`, and the candidate lengths."""
    least, align = smallest_tile(like.margin, like.ramp, like.align), like.align
    longest = min(ceil(max(lengths) / align) * align, 2 * isqrt(most_pixels) // align * align)
    tiles = set(range(least, max(least, longest) + 1, ceil(_STEP_PX / align) * align))
    fitting = Counter(ceil(length / align) * align for length in lengths)
    tiles |= {length for length, _ in fitting.most_common(_MOST_LENGTHS) if least <= length <= longest}
    cuts = [replace(like, tile=tile) for tile in sorted(tiles)]
    distinct, where = np.unique(lengths, return_inverse=True)
    counts = np.array([[count_tiles(int(length), cut) for length in distinct] for cut in cuts])
    return counts[:, where], np.array([cut.tile for cut in cuts])


class TilePlanner:
    """Chooses tiles. Creating it raises `RedlineError` if the requested tile is smaller than the overlap allows."""

    def __init__(self, settings: UpscaleSettings, network: Network, plan: Plan, device: torch.device | str) -> None:
        self._settings, self._network, self._device = settings, network, torch.device(device)
        self._smallest = smallest_tile(settings.margin_px, settings.ramp_px, network.window)
        self._limits = _shape_limits(plan)
        if network.tile and network.tile < self._smallest:
            overlap = 2 * settings.margin_px + settings.ramp_px
            raise RedlineError(
                f"{network.name} takes tiles of {network.tile}, too small for an overlap of {overlap}: "
                f"export it with --tile {self._smallest} or more."
            )
        for size in settings.tile_sizes or ():
            if min(size) < self._smallest:
                raise RedlineError(f"a tile of {min(size)} is too small: use {self._smallest} or more.")

    def choose(self, sizes: Sizes, tiles: Tiles | None = None, sharing: int = 1) -> tuple[Tiling, int]:
        """Returns the tiling and the batch size for images of these sizes.

        Uses the sizes and the batch size in `tiles` if they are given. `sharing` workers divide the memory of the
        device among them.
        """
        memory_bytes = self._settings.memory_bytes
        if tiles is not None and tiles.batch and memory_bytes is None:
            return self.tiling(tiles.sizes, tiles.batch), tiles.batch
        budget = (memory_bytes or memory_for_tiles(self._device)) // sharing
        cost = measure_cost(self._network, self._device)
        if tiles is None:
            like, batch = self._cut(self._smallest), self._settings.tile_batch
            return choose_tiles(cost, budget, like, sizes, batch, self._device.type, self._limits)
        # Raises only for a limit given by the user. Otherwise, the batch is reduced later if memory runs out.
        enforced = memory_bytes is not None
        return with_batch(cost, budget, self.tiling(tiles.sizes), sizes, tiles.batch, self._limits.fills, enforced)

    def tiling(self, sizes: TileSizes, batch: int = 1) -> Tiling:
        """Returns tiles of these widths and heights, rounded up to multiples of the network's window."""
        window = self._network.window
        rounded = ((-(-length // window) * window for length in size) for size in sizes)
        shapes = tuple(TileShape(self._cut(height), self._cut(width)) for width, height in rounded)
        return Tiling(shapes, batch if self._limits.fills else 1)

    def known_tiles(self, sizes: Sizes, earlier: Tiles | None) -> Tiles | None:
        """Returns the tiles of the exported network, the requested ones, or those of the resumed run; else None."""
        settings, exported = self._settings, self._network.tile
        if exported:  # the memory use of an exported network is not measured
            return Tiles(((exported, exported),), settings.tile_batch or 1)
        if settings.tile_sizes is None:
            return replace(earlier, batch=settings.tile_batch or earlier.batch) if earlier else None
        # The tile is limited to the largest image, because a larger tile would compute padding.
        widest, tallest = (max(self._smallest, max(side)) for side in zip(*sizes, strict=True))
        limited = tuple((min(width, widest), min(height, tallest)) for width, height in settings.tile_sizes)
        wanted = self.tiling(limited).sizes
        batch = earlier.batch if earlier and earlier.sizes == wanted else None
        return Tiles(wanted, settings.tile_batch or batch)

    def with_padding(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the size that is cut into tiles: larger than the image if its edges wrap around."""
        return padded_size(size, self._cut(self._smallest), self._settings.images.wrap)

    def sizes_of(self, tasks: Sequence[Task]) -> Sizes:
        """Returns the sizes with padding of the first images and videos, or one large size if none can be read."""
        sizes: list[tuple[int, int]] = []
        for task in tasks[:_MOST_READ]:
            with suppress(RedlineError, OSError):
                if task.is_video:
                    video = probe(task.source)
                    sizes.append((video.width, video.height))
                else:
                    with open_image(task.source, self._settings.images.max_pixels) as image:
                        sizes.append((image.width, image.height))
        return tuple(map(self.with_padding, sizes or [(_UNREADABLE_SIDE_PX, _UNREADABLE_SIDE_PX)]))

    def _cut(self, tile: int) -> Cut:
        return Cut(tile, self._settings.margin_px, self._settings.ramp_px, self._network.window)


def _shape_limits(plan: Plan) -> ShapeLimits:
    """Returns how many tile shapes the plan can serve, and what one more shape costs.

    Capturing a CUDA graph for another shape takes seconds. Compiled code is slow for shapes it was not compiled for.
    """
    compiles = any(rung.stage == Stage.COMPILE for rung in plan.rungs)
    captures = [rung for rung in plan.rungs if rung.stage == Stage.LAUNCH]
    passes = max((getattr(rung, "rehearsals", 0) for rung in captures), default=0)
    return ShapeLimits(1 if compiles else MOST_SHAPES, passes, compiles or bool(captures))
