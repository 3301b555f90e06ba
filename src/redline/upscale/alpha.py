"""Clamps upscaled alpha to the range of the source pixels around each position.

Alpha goes through the network as a grey image. The network's output is only near 0 or 1 where the source is exactly 0
or 1, above all in bf16, and a nearly transparent pixel is still visible. Clamping makes flat regions exact.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from redline.upscale.tiling import PaddedSide


def bounded_alpha(enlarged: Iterable[Tensor], alpha: Tensor, columns: PaddedSide, scale: int) -> Iterator[Tensor]:
    """Clamps upscaled tiles (1, 3, scale · tile height, scale · tile width) of a band of alpha (1, tile height, W)."""
    padded = alpha[..., columns.positions_on(alpha.device)]
    # Upscaling moves an edge by less than a pixel, so the range over the direct neighbours is enough.
    highest, lowest = _max_of_neighbours(padded), -_max_of_neighbours(-padded)
    for left, tile in zip(columns.side.starts, enlarged, strict=True):
        inside = slice(left, left + columns.side.cut.tile)
        low, high = (_repeated(bound[..., inside], scale) for bound in (lowest, highest))
        yield torch.clamp(tile.to(alpha.device, torch.float32), low, high)


def bounded_whole_alpha(enlarged: Tensor, alpha: Tensor, scale: int, wrap: bool = False) -> Tensor:
    """Clamps upscaled alpha (B, C, scale · H, scale · W) of whole images, whose own alpha is (B, 1, H, W)."""
    padded = pad(alpha, (1, 1, 1, 1), mode="circular" if wrap else "replicate")
    highest, lowest = _max_of_neighbours(padded), -_max_of_neighbours(-padded)
    low, high = (_repeated(bound[..., 1:-1, 1:-1], scale) for bound in (lowest, highest))
    return torch.clamp(enlarged, low, high)


def _max_of_neighbours(plane: Tensor) -> Tensor:
    return max_pool2d(plane, 3, stride=1, padding=1)


def _repeated(plane: Tensor, scale: int) -> Tensor:
    return plane.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
