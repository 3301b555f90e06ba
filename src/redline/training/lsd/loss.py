"""How far off an output is, counted by how much better a clip gets.

Dark clips are far off, and good ones near: by plain differences the dark ones would outweigh all others, and a model
would brighten what is bright enough. So each clip's difference is divided by its input's: 1 is as bad as the input.
"""

import torch
from torch import Tensor

# Differences below this count by their square, above it by their size; pictures are in [-1, 1].
_SOFT = 0.03
# What is left of a good input's own difference, so that a flawless one does not count without end.
_LEAST = 0.03


def soft_abs(difference: Tensor) -> Tensor:
    return (difference.square() + _SOFT**2).sqrt() - _SOFT


def difference(one: Tensor, other: Tensor, weights_B: Tensor) -> Tensor:
    """The mean over the clips, each by its weight."""
    return (weights_B * soft_abs(one - other).flatten(1).mean(1)).mean()


@torch.no_grad()
def weights_by_input(seen: Tensor, target: Tensor) -> Tensor:
    """One over how bad each clip's input is."""
    return 1 / (soft_abs(seen - target).flatten(1).mean(1) + _LEAST)
