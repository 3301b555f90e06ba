"""Corrupts the history frame in the way a model's output degrades over time: colour shift, noise, blur, displacement.

A model trained only on true frames as history accumulates its own errors. Trained on corrupted ones, it corrects them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.warp import positions, warp

# The largest gain and offset of each colour, noise (all on a scale of [-1, 1]), and displacement in pixels.
_GAIN, _OFFSET, _NOISE, _MOVED_PX = 0.12, 0.08, 0.12, 2.0


def corrupted(previous: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Corrupts a share of the images, each differently. Images are in [-1, 1]."""
    batch, channels, height, width = previous.shape

    def some(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator, device=previous.device)

    moved = positions(height, width, previous.device) + (some(1, 1, 2) * 2 - 1) * _MOVED_PX
    result = warp(previous, moved)
    soft = F.avg_pool2d(result, 3, 1, 1, count_include_pad=False)
    result = torch.lerp(result, soft, some(1, 1, 1))
    result = result * (1 + _GAIN * (some(channels, 1, 1) * 2 - 1)) + _OFFSET * (some(channels, 1, 1) * 2 - 1)
    noise = torch.randn(previous.shape, generator=generator, device=previous.device)
    result = (result + _NOISE * some(1, 1, 1) * noise).clamp(-1, 1)
    return torch.where(some(1, 1, 1) < share, result, previous)
