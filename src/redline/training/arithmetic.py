"""How gradients reach the trained weights: directly in fp32 and autocast, through a low-precision copy otherwise."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Arithmetic:
    """Computes with the trained weights themselves; subclasses compute with a copy."""

    name = "fp32"

    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients on the trained weights."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> bool:
        """Undoes the loss scaling of the gradients, once per step. Returns whether they overflowed."""
        return False

    def publish(self) -> None:
        """Updates the copy after an optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state, after the trained weights have been restored."""
        self.publish()
