"""What a kind of model brings to the loop."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class Task(Protocol):
    """A model, the loss of each step, and how to judge what it has learnt.

    `loss(step)` draws the batch of that step itself, from the seed and the step alone, so that a training that is
    resumed sees what it would have seen. `identity` holds, as JSON can, what makes a checkpoint this training's.
    """

    model: nn.Module
    unit: str
    items_per_step: int

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def loss(self, step: int) -> Tensor: ...

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Figures by name, of a model with averaged weights in evaluation mode; none when there is nothing to use."""
        ...
