"""Matlab's `imresize(…, 'bicubic')`, the standard downscaling in super-resolution research.

The kernel is Keys' cubic with a = −½. For downscaling, the kernel is widened by the scale factor to prevent aliasing.
Images are padded by mirroring, the outermost pixel included. 8-bit images are rounded after each of the two passes, as
in Matlab. Other bicubic implementations (a = −¾, no antialiasing, replicated edges) give different images: the models
were not trained on such images, and scores on them cannot be compared with published scores.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from redline.errors import RedlineError

_SUPPORT = 4.0


def resize(image: Tensor, scale: float) -> Tensor:
    """Resizes (…, H, W) of floats or bytes to (…, ⌈scale·H⌉, ⌈scale·W⌉)."""
    if not (math.isfinite(scale) and scale > 0):
        raise RedlineError(f"scale must be a finite number above zero, not {scale}.")
    height, width = (math.ceil(length * scale) for length in image.shape[-2:])
    return _resize(image, (height, scale), (width, scale))


def resize_to(image: Tensor, height: int, width: int) -> Tensor:
    """Resizes (…, H, W) of floats or bytes to (…, height, width), with a separate factor for each side."""
    if height < 1 or width < 1:
        raise RedlineError(f"cannot resize an image to {height} × {width}.")
    return _resize(image, (height, height / image.shape[-2]), (width, width / image.shape[-1]))


def to_8_bits(image: Tensor) -> Tensor:
    """Rounds values of 0…255 to bytes; rounds halves up, as Matlab does."""
    return (image + 0.5).floor().clamp(0, 255).to(torch.uint8)


def cubic(distance: Tensor) -> Tensor:
    """Keys' kernel with a = −½."""
    near = distance.abs()
    inner = 1.5 * near**3 - 2.5 * near**2 + 1
    outer = -0.5 * near**3 + 2.5 * near**2 - 4 * near + 2
    return torch.where(near <= 1, inner, torch.where(near <= 2, outer, torch.zeros_like(near)))


def _resize(image: Tensor, rows: tuple[int, float], columns: tuple[int, float]) -> Tensor:
    if not image.is_floating_point() and image.dtype != torch.uint8:
        raise RedlineError(f"bicubic resizing supports floats and bytes, not {image.dtype}.")
    if image.ndim < 2 or not image.shape[-1] or not image.shape[-2]:
        raise RedlineError(f"cannot resize an image of shape {tuple(image.shape)}.")
    # As in Matlab, the side with the smaller factor is resized first. If both factors are equal, the height is first.
    for scale, side, length in sorted([(rows[1], -2, rows[0]), (columns[1], -1, columns[0])]):
        image = _resize_side(image, side, length, scale)
    return image


def _resize_side(image: Tensor, side: int, length: int, scale: float) -> Tensor:
    dtype = torch.promote_types(image.dtype, torch.float32)
    positions, weights = contributions(image.shape[side], length, scale)
    positions, weights = positions.to(image.device), weights.to(image.device, dtype)
    across = (-1, 1) if side == -2 else (-1,)
    shape = [*image.shape]
    shape[side] = length
    result = image.new_zeros(shape, dtype=dtype)
    # Adds one tap at a time, because gathering all taps at once would multiply the memory use.
    for position, weight in zip(positions.unbind(1), weights.unbind(1), strict=True):
        result += image.index_select(side, position) * weight.view(across)
    return to_8_bits(result) if image.dtype == torch.uint8 else result.to(image.dtype)


@lru_cache(maxsize=64)
def contributions(length: int, new_length: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the source positions and weights of each output pixel, two tensors of (new_length, taps)."""
    stretch = min(scale, 1.0)
    support = _SUPPORT / stretch
    # Centers of the output pixels in source coordinates, where pixel k covers k − ½ … k + ½.
    centres = (torch.arange(new_length, dtype=torch.float64) + 0.5) / scale - 0.5
    # Matlab rounds positions that count from 1; afterwards they are converted to count from 0.
    first = torch.floor(centres + 1 - support / 2) - 1
    positions = first[:, None] + torch.arange(math.ceil(support) + 2, dtype=torch.float64)
    weights = cubic((centres[:, None] - positions) * stretch)
    weights = weights / weights.sum(1, keepdim=True)
    used = (weights != 0).any(0)
    return mirrored(positions[:, used].long(), length), weights[:, used]


def mirrored(positions: Tensor, length: int) -> Tensor:
    """Maps positions beyond the edge into the image by mirroring, with the outermost pixel repeated."""
    positions = positions % (2 * length)
    return torch.minimum(positions, 2 * length - 1 - positions)
