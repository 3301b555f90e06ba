"""Pads the sides of an image and cuts them into tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from redline.upscale.tiling import Cut, Side, cut_side
from redline.video.padding_index import reflected, wrapped


@dataclass(frozen=True)
class PaddedSide:
    """A padded side of an image: how it is cut into tiles, and which source position each padded position shows."""

    length: int
    before: int
    side: Side
    wraps: bool
    positions: Tensor

    def inside(self, scale: int) -> slice:
        """Returns the part of the upscaled side that is the image itself."""
        return slice(self.before * scale, (self.before + self.length) * scale)

    def positions_on(self, device: torch.device) -> Tensor:
        """Copies the positions once per device, because all frames of a video share them and a copy synchronizes."""
        return (
            self.positions if device.type == "cpu" else _sent_positions(self.length, self.side.cut, self.wraps, device)
        )


def pad_side(length: int, cut: Cut, wrap: bool = False) -> PaddedSide:
    """Pads by reflection to the end of the last tile. A texture that wraps is continued at both ends instead."""
    before = cut.around if wrap else 0
    side = cut_side(length + 2 * before, cut)
    positions = (wrapped if wrap else reflected)(-before, side.padded - before, length)
    return PaddedSide(length, before, side, wrap, positions)


@lru_cache(maxsize=32)
def _sent_positions(length: int, cut: Cut, wrap: bool, device: torch.device) -> Tensor:
    return pad_side(length, cut, wrap).positions.to(device)
