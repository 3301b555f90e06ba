"""Transparency goes through the network as grey, and stays between the least and the greatest of the pixels around it.

What is flat in the source is therefore exact in the result: a network, above all one that computes in bf16, comes near
0 and near 1, and a pixel that is nearly transparent is still seen.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from redline.upscale.padding import PaddedSide


def bounded_alpha(enlarged: Iterable[Tensor], alpha: Tensor, columns: PaddedSide, scale: int) -> Iterator[Tensor]:
    """The enlarged tiles (1, 3, scale · tile height, scale · tile width) of a band of alpha (1, tile height, W)."""
    padded = alpha[..., columns.positions_on(alpha.device)]
    # An edge that moves by less than a pixel takes no value that is not there one pixel further.
    greatest, least = (_of_neighbours(padded), -_of_neighbours(-padded))
    for left, tile in zip(columns.side.starts, enlarged, strict=True):
        inside = slice(left, left + columns.side.cut.tile)
        below, above = (_repeated(bound[..., inside], scale) for bound in (least, greatest))
        yield torch.clamp(tile.to(alpha.device, torch.float32), below, above)


def _of_neighbours(plane: Tensor) -> Tensor:
    return max_pool2d(plane, 3, stride=1, padding=1)


def _repeated(plane: Tensor, scale: int) -> Tensor:
    return plane.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
