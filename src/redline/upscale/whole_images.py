"""Pictures that fit in memory whole, as a film's do: enlarged by tiles, and put together where there is room."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from redline.machine.memory import is_out_of_memory
from redline.upscale.blend import enlarge_each_by_tiles
from redline.upscale.tile_runner import Enlarger, OutOfMemory

A = TypeVar("A")


class WholePictures:
    """Called with (B, 3, H, W) in [0, 1] and with what is done with the enlarged ones, (B, 3, scale · H, scale · W), on
    the device or in main memory: when memory runs out in that, it is done again too."""

    def __init__(self, enlarger: Enlarger) -> None:
        self._enlarger, self._place = enlarger, enlarger.device
        self._can_leave = enlarger.copies.has_own_memory

    def __call__(self, pictures: Tensor, finish: Callable[[Tensor], A]) -> A:
        while True:
            try:
                return finish(self._enlarge(pictures.to(self._place)))
            except Exception as error:
                if not is_out_of_memory(error) and not (isinstance(error, OutOfMemory) and self._can_leave):
                    raise
            # Out of the handler, where the failed attempt's tensors are no longer held by its traceback.
            self._make_room(pictures)

    def _enlarge(self, pictures: Tensor) -> Tensor:
        enlarger = self._enlarger
        shape = enlarger.tiling.shape_for((pictures.shape[-1], pictures.shape[-2]))

        def enlarge_each(batches: Iterable[Tensor]) -> Iterator[Tensor]:
            return (enlarged.to(self._place) for enlarged in enlarger.checked_each(batches))

        return enlarge_each_by_tiles(pictures, enlarge_each, enlarger.network.scale, shape, enlarger.batch)

    def _make_room(self, pictures: Tensor) -> None:
        if not self._can_leave:
            shape = self._enlarger.tiling.shape_for((pictures.shape[-1], pictures.shape[-2]))
            self._enlarger.shrink(shape.rows.tile, shape.columns.tile)
            return
        self._place, self._can_leave = torch.device("cpu"), False
        self._enlarger.say("out of memory: pictures are put together in main memory from now on")
