"""A picture's sides with what stands around them, cut into tiles."""

import math
from dataclasses import dataclass

from torch import Tensor

from redline.edges import reflected, wrapped
from redline.upscale.layout import Cut, Side, cut_side


@dataclass(frozen=True)
class Framed:
    """One side of a picture with what stands around it: where tiles start, and which position is at each place."""

    length: int
    before: int
    side: Side
    positions: Tensor

    def inside(self, scale: int) -> slice:
        """The picture itself in the enlarged side."""
        return slice(self.before * scale, (self.before + self.length) * scale)


def frame(length: int, cut: Cut, wrap: bool = False) -> Framed:
    """Mirrored to the end of the last tile; for a texture that wraps, its other side stands around it."""
    before = math.ceil(cut.overlap / 2 / cut.align) * cut.align if wrap else 0
    side = cut_side(length + 2 * before, cut)
    positions = (wrapped if wrap else reflected)(-before, side.padded - before, length)
    return Framed(length, before, side, positions)
