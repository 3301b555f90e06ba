"""The LSD loss: the difference between output and target, relative to the difference between input and target.

Absolute differences would give dark clips more weight than all others, and the model would brighten images that are
bright enough. With relative ones, a loss of 1 means that the output is as far from the target as the input is.
"""

import torch
from torch import Tensor

# Differences below this count quadratically, above it linearly; images are in [-1, 1].
_SOFT = 0.03
# Added to the input's difference, so that the weight of a perfect input stays finite.
_LEAST = 0.03


def soft_abs(difference: Tensor) -> Tensor:
    return (difference.square() + _SOFT**2).sqrt() - _SOFT


def difference(one: Tensor, other: Tensor, weights_B: Tensor) -> Tensor:
    """Returns the weighted mean difference over the clips."""
    return (weights_B * soft_abs(one - other).flatten(1).mean(1)).mean()


@torch.no_grad()
def weights_by_input(seen: Tensor, target: Tensor) -> Tensor:
    """Returns a weight for each clip: the inverse of the difference between its input and its target."""
    return 1 / (soft_abs(seen - target).flatten(1).mean(1) + _LEAST)
