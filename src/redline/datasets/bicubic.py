"""Matlab's `imresize(…, 'bicubic')`: the reduction by which the field makes its small pictures.

The kernel is Keys' cubic with a = −½. When shrinking, it is stretched by the factor, which is what keeps high
frequencies from folding back. Beyond its edge a picture is mirrored, the outermost pixel included. Pictures of bytes
are rounded after each of the two sides, as Matlab rounds them. Libraries that call something else bicubic (a = −¾, no
stretching, edges repeated) give pictures that models of this field were not trained on, and scores that cannot be
compared.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from redline.errors import RedlineError

_SUPPORT = 4.0


def resize(picture: Tensor, scale: float) -> Tensor:
    """(…, H, W) of floats or bytes to (…, ⌈scale·H⌉, ⌈scale·W⌉) of the same."""
    if not (math.isfinite(scale) and scale > 0):
        raise RedlineError(f"a picture cannot be resized {scale} times.")
    height, width = (math.ceil(length * scale) for length in picture.shape[-2:])
    return _resize(picture, (height, scale), (width, scale))


def resize_to(picture: Tensor, height: int, width: int) -> Tensor:
    """(…, H, W) of floats or bytes to (…, height, width); each side by its own factor."""
    if height < 1 or width < 1:
        raise RedlineError(f"a picture cannot be resized to {height} × {width}.")
    return _resize(picture, (height, height / picture.shape[-2]), (width, width / picture.shape[-1]))


def to_8_bits(picture: Tensor) -> Tensor:
    """Rounds values of 0…255 to bytes as Matlab does: halves go up."""
    return (picture + 0.5).floor().clamp(0, 255).to(torch.uint8)


def cubic(distance: Tensor) -> Tensor:
    """Keys' kernel with a = −½."""
    near = distance.abs()
    inner = 1.5 * near**3 - 2.5 * near**2 + 1
    outer = -0.5 * near**3 + 2.5 * near**2 - 4 * near + 2
    return torch.where(near <= 1, inner, torch.where(near <= 2, outer, torch.zeros_like(near)))


def _resize(picture: Tensor, rows: tuple[int, float], columns: tuple[int, float]) -> Tensor:
    if not picture.is_floating_point() and picture.dtype != torch.uint8:
        raise RedlineError(f"bicubic resizing takes floats or bytes, not {picture.dtype}.")
    if picture.ndim < 2 or not picture.shape[-1] or not picture.shape[-2]:
        raise RedlineError(f"a picture of shape {tuple(picture.shape)} cannot be resized.")
    # Matlab resizes the side with the smaller factor first, rows before columns.
    for scale, side, length in sorted([(rows[1], -2, rows[0]), (columns[1], -1, columns[0])]):
        picture = _along(picture, side, length, scale)
    return picture


def _along(picture: Tensor, side: int, length: int, scale: float) -> Tensor:
    dtype = torch.promote_types(picture.dtype, torch.float32)
    positions, weights = contributions(picture.shape[side], length, scale)
    positions, weights = positions.to(picture.device), weights.to(picture.device, dtype)
    across = (-1, 1) if side == -2 else (-1,)
    shape = [*picture.shape]
    shape[side] = length
    result = picture.new_zeros(shape, dtype=dtype)
    # One tap at a time: a gather of all of them would need as many times the memory.
    for place, weight in zip(positions.unbind(1), weights.unbind(1), strict=True):
        result += picture.index_select(side, place) * weight.view(across)
    return to_8_bits(result) if picture.dtype == torch.uint8 else result.to(picture.dtype)


@lru_cache(maxsize=64)
def contributions(length: int, new_length: int, scale: float) -> tuple[Tensor, Tensor]:
    """Which positions make up each new one, and with what weight: two tensors of (new_length, taps), in float64."""
    stretch = min(scale, 1.0)
    support = _SUPPORT / stretch
    # Centres of the new pixels, in the old picture's coordinates, where pixel k covers k − ½ … k + ½.
    centres = (torch.arange(new_length, dtype=torch.float64) + 0.5) / scale - 0.5
    # Positions counted from 1, as Matlab's floor sees them, and then from 0.
    first = torch.floor(centres + 1 - support / 2) - 1
    positions = first[:, None] + torch.arange(math.ceil(support) + 2, dtype=torch.float64)
    weights = cubic((centres[:, None] - positions) * stretch)
    weights = weights / weights.sum(1, keepdim=True)
    used = (weights != 0).any(0)
    return mirrored(positions[:, used].long(), length), weights[:, used]


def mirrored(positions: Tensor, length: int) -> Tensor:
    """Positions beyond the edge, mirrored with the outermost pixel repeated."""
    positions = positions % (2 * length)
    return torch.minimum(positions, 2 * length - 1 - positions)
