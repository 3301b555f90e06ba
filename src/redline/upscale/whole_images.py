"""Upscales images that fit in memory as a whole, such as video frames, tile by tile."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from redline.machine.memory import is_out_of_memory
from redline.upscale.blend import enlarge_each_by_tiles
from redline.upscale.tile_runner import OutOfMemory, TileRunner

A = TypeVar("A")


class WholeImages:
    """Upscales images (B, 3, H, W) in [0, 1] and applies a function to the result (B, 3, scale · H, scale · W).

    The result is on the device, or in main memory after the device ran out of memory. When memory runs out, both the
    upscaling and the function are repeated.
    """

    def __init__(self, tile_runner: TileRunner, wrap: bool = False) -> None:
        self._tile_runner, self._wrap, self._place = tile_runner, wrap, tile_runner.device
        self._can_leave = tile_runner.copies.has_device_memory

    def __call__(self, images: Tensor, finish: Callable[[Tensor], A]) -> A:
        while True:
            try:
                return finish(self._enlarge(images.to(self._place)))
            except Exception as error:
                if not is_out_of_memory(error) and not (isinstance(error, OutOfMemory) and self._can_leave):
                    raise
            # Called outside of the handler, because the traceback keeps the tensors of the failed attempt alive.
            self._make_room(images)

    def _enlarge(self, images: Tensor) -> Tensor:
        tile_runner = self._tile_runner
        shape = tile_runner.tiling.shape_for((images.shape[-1], images.shape[-2]), self._wrap)

        def enlarge_each(batches: Iterable[Tensor]) -> Iterator[Tensor]:
            return (enlarged.to(self._place) for enlarged in tile_runner.checked_each(batches))

        return enlarge_each_by_tiles(
            images, enlarge_each, tile_runner.network.scale, shape, tile_runner.batch, self._wrap
        )

    def _make_room(self, images: Tensor) -> None:
        if not self._can_leave:
            shape = self._tile_runner.tiling.shape_for((images.shape[-1], images.shape[-2]), self._wrap)
            self._tile_runner.shrink(shape.rows.tile, shape.columns.tile)
            return
        self._place, self._can_leave = torch.device("cpu"), False
        self._tile_runner.say("out of memory: from now on, tiles are blended in main memory")
