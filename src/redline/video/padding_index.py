"""Positions beyond a picture's edge: mirrored, or taken from the other side, however far outside they lie."""

import torch
from torch import Tensor


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
