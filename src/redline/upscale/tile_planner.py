"""Chooses the tile sizes and the batch size of a run: as requested, as in the run that is resumed, or from memory."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.upscale.images.source import open_image
from redline.upscale.network import Network
from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings
from redline.upscale.tasks import Task
from redline.upscale.tile_choice import (
    MOST_SHAPES,
    ShapeLimits,
    choose_tiles,
    measure_cost,
    memory_for_tiles,
    with_batch,
)
from redline.upscale.tiling import Cut, TileShape, Tiling, padded_size, smallest_tile
from redline.upscale.video.probe import probe

Sizes = tuple[tuple[int, int], ...]

_UNREADABLE_SIDE_PX = 100_000
# How many images and videos are opened to find out their sizes.
_MOST_READ = 256


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
        # Only a limit given by the user is enforced. Otherwise the batch shrinks when memory runs out.
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
        """Returns the size that is cut into tiles: larger than the image if it wraps around."""
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
                    with open_image(task.source, self._settings.images.pixel_limit) as image:
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
