"""Positions beyond a picture's edge: mirrored, or taken from the other side, however far outside they lie."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.upscale.layout import Cut, Side, cut_side


def reflected(first: int, last: int, length: int) -> Tensor:
    """Which position stands at each of `first` … `last` − 1 when the picture is mirrored at its outermost pixels."""
    positions = torch.arange(first, last)
    if length == 1:
        return torch.zeros_like(positions)
    period = 2 * (length - 1)
    positions = positions % period
    return torch.where(positions < length, positions, period - positions)


def wrapped(first: int, last: int, length: int) -> Tensor:
    """The same for a picture that goes on at its other side."""
    return torch.arange(first, last) % length


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
