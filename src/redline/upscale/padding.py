"""A image's sides with what stands around them, cut into tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from redline.upscale.tiling import Cut, Side, cut_side
from redline.video.padding_index import reflected, wrapped


@dataclass(frozen=True)
class PaddedSide:
    """One side of a image with what stands around it: where tiles start, and which position is at each place."""

    length: int
    before: int
    side: Side
    wraps: bool
    positions: Tensor

    def inside(self, scale: int) -> slice:
        """The image itself in the enlarged side."""
        return slice(self.before * scale, (self.before + self.length) * scale)

    def positions_on(self, device: torch.device) -> Tensor:
        """Sent there once: a frame of a video has the sides of the one before, and sending waits for the device."""
        return (
            self.positions if device.type == "cpu" else _sent_positions(self.length, self.side.cut, self.wraps, device)
        )


def pad_side(length: int, cut: Cut, wrap: bool = False) -> PaddedSide:
    """Mirrored to the end of the last tile; for a texture that wraps, its other side stands around it."""
    before = cut.around if wrap else 0
    side = cut_side(length + 2 * before, cut)
    positions = (wrapped if wrap else reflected)(-before, side.padded - before, length)
    return PaddedSide(length, before, side, wrap, positions)


@lru_cache(maxsize=32)
def _sent_positions(length: int, cut: Cut, wrap: bool, device: torch.device) -> Tensor:
    return pad_side(length, cut, wrap).positions.to(device)
