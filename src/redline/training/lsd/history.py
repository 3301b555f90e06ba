"""History as it may be when a model has run for an hour: a little off in colour, noisy, soft, and not quite in place.

A model that has only ever seen true frames as its history trusts it, and adds its own small errors to it for ever. One
that has seen it go wrong looks at the frame and puts it right.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.warp import positions, warp

# At most, on a scale of [-1, 1]: gain and offset of each colour, noise, and pixels out of place.
_GAIN, _OFFSET, _NOISE, _MOVED_PX = 0.12, 0.08, 0.12, 2.0


def corrupted(previous: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the pictures, each in its own way; the others as they are. Pictures in [-1, 1]."""
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
