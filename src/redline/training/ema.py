"""An exponential moving average of a model's weights."""

import copy

import torch
from torch import Tensor, nn


@torch.no_grad()
def add_to_average(averaged: list[Tensor], weights: list[Tensor], decay: float, step: int) -> None:
    """Updates the averaged weights with the weights after `step` steps."""
    # The first steps have a lower decay, so that the average forgets the random weights.
    torch._foreach_lerp_(averaged, weights, 1 - min(decay, step / (10 + step)))


class Ema:
    """Holds the averaged weights in `model`, a copy of the trained model in evaluation mode."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        # Collected only once, because walking the modules of a deep model takes longer than averaging its weights.
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._followed = model
        self._weights: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after `step` steps to the average."""
        add_to_average(self._averaged, self._weights, self.decay, step)
        # Buffers are collected each time, because a module may replace them.
        for kept, new in zip(self.model.buffers(), self._followed.buffers(), strict=True):
            kept.copy_(new)
