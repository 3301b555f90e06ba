"""What must not pass: three that do nothing of what a live model is for, each the best at something else.

A constant picture never flickers and never drifts; noise never freezes; the input itself is never far from the input.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# The frame and what was made of the one before, both in [0, 1].
Make = Callable[[Tensor, Tensor], Tensor]


def constant(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.full_like(frame, 0.5)


def noise(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.rand_like(frame)


def identity(frame: Tensor, previous: Tensor) -> Tensor:
    return frame


CONTROLS: dict[str, Make] = {"constant": constant, "noise": noise, "identity": identity}
