"""Controls that must not pass: each does nothing useful, and is perfect in one respect.

A constant image never flickers or drifts, noise never freezes, and the identity is never far from its input.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Maps the frame and the previous output to the new output, all in [0, 1].
Model = Callable[[Tensor, Tensor], Tensor]


def constant(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.full_like(frame, 0.5)


def noise(frame: Tensor, previous: Tensor) -> Tensor:
    return torch.rand_like(frame)


def identity(frame: Tensor, previous: Tensor) -> Tensor:
    return frame


CONTROLS: dict[str, Model] = {"constant": constant, "noise": noise, "identity": identity}
