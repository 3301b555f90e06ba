"""Index tensors for padding an image by reflection or wrapping, by any number of pixels."""

import torch
from torch import Tensor


def reflected(first: int, last: int, length: int) -> Tensor:
    """Returns the source index of each position from `first` to `last` − 1 in an image reflected at its edge pixels."""
    positions = torch.arange(first, last)
    if length == 1:
        return torch.zeros_like(positions)
    period = 2 * (length - 1)
    positions = positions % period
    return torch.where(positions < length, positions, period - positions)


def wrapped(first: int, last: int, length: int) -> Tensor:
    """Returns the source index of each position from `first` to `last` − 1 in an image that repeats periodically."""
    return torch.arange(first, last) % length
