"""The LSD loss, and the corruption of the history.

The loss is the difference between output and target, relative to the difference between input and target. Absolute
differences would give dark clips more weight than all others, and the model would brighten images that are
already bright enough. With relative differences, a loss of 1 means that the output is as far from the target as the
input is.

The history frame is corrupted in the way a model's output degrades over time: colour shift, noise, blur, displacement.
A model trained only on clean history frames accumulates its own errors; trained on corrupted history frames, it
corrects them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips.warp import positions, warp

# The loss is quadratic in differences below this, and linear above; images are in [-1, 1].
_SOFT = 0.03
# Added to the difference between input and target, so that the weight of a perfect input stays finite.
_LEAST = 0.03
# The strongest corruption: the change of each colour's gain and offset, the standard deviation of the noise (for images
# in [-1, 1]), and the displacement in pixels.
_GAIN, _OFFSET, _NOISE, _MOVED_PX = 0.12, 0.08, 0.12, 2.0


def soft_abs(difference: Tensor) -> Tensor:
    return (difference.square() + _SOFT**2).sqrt() - _SOFT


def difference(one: Tensor, other: Tensor, weights_B: Tensor) -> Tensor:
    """Returns the weighted mean difference over the clips."""
    return (weights_B * soft_abs(one - other).flatten(1).mean(1)).mean()


@torch.no_grad()
def weights_by_input(seen: Tensor, target: Tensor) -> Tensor:
    """Returns a weight for each clip: the inverse of the difference between its input and its target."""
    return 1 / (soft_abs(seen - target).flatten(1).mean(1) + _LEAST)


def corrupted(previous: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Corrupts each image with probability `share` and random parameters of its own. Images are in [-1, 1]."""
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
