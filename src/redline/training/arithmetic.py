"""What lies between a loss and the weights that are trained: nothing for fp32 and autocast, more for low precision."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Arithmetic:
    """The weights that are trained are the ones that are computed with; subclasses change that."""

    name = "fp32"

    def backward(self, loss: Tensor) -> None:
        """Leaves gradients on the trained weights, added to those that are there."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> bool:
        """Once a step, before gradients are looked at; whether they overflowed, so that the step is lost."""
        return False

    def publish(self) -> None:
        """After a step: what is computed with follows what was trained."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the trained weights were put back."""
        self.publish()
