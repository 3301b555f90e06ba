"""The LSD loss: the difference of the output, relative to that of the input.

In absolute terms, dark clips would outweigh all others, and the model would brighten images that are bright enough. So
each clip's difference is divided by that of its input: a loss of 1 is as bad as the input.
"""

import torch
from torch import Tensor

# Differences below this count quadratically, above it linearly; images are in [-1, 1].
_SOFT = 0.03
# A lower bound of the input's difference, so that the weight of a perfect input stays finite.
_LEAST = 0.03


def soft_abs(difference: Tensor) -> Tensor:
    return (difference.square() + _SOFT**2).sqrt() - _SOFT


def difference(one: Tensor, other: Tensor, weights_B: Tensor) -> Tensor:
    """Returns the weighted mean difference over the clips."""
    return (weights_B * soft_abs(one - other).flatten(1).mean(1)).mean()


@torch.no_grad()
def weights_by_input(seen: Tensor, target: Tensor) -> Tensor:
    """Returns the inverse of the difference of each clip's input."""
    return 1 / (soft_abs(seen - target).flatten(1).mean(1) + _LEAST)
