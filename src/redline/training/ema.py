"""An average of a model's weights over its last steps: less noise than any one step's, for the price of a copy."""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Keeps `model`, a copy in evaluation mode whose weights follow the trained ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        # Found once: going through the modules of a deep model takes longer than averaging its weights.
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._followed = model
        self._weights: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the weights after `step` steps."""
        if model is not self._followed:
            self._followed = model
            self._weights = list(model.parameters())
        # Early on the average is short, or it would carry the random start along.
        decay = min(self.decay, step / (10 + step))
        torch._foreach_lerp_(self._averaged, self._weights, 1 - decay)
        # Buffers are looked for each time: a module may put another one in a buffer's place.
        for kept, new in zip(self.model.buffers(), model.buffers(), strict=True):
            kept.copy_(new)
