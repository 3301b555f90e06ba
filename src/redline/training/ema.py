"""An average of a model's weights over its last steps: less noise than any one step's, for the price of a copy."""

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Keeps `model`, a copy in evaluation mode whose weights follow the trained ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the weights after `step` steps."""
        # Early on the average is short, or it would carry the random start along.
        decay = min(self.decay, step / (10 + step))
        averaged: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(averaged, [weight.detach() for weight in model.parameters()], 1 - decay)
        for kept, new in zip(self.model.buffers(), model.buffers(), strict=True):
            kept.copy_(new)
