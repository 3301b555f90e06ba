"""What a kind of model brings to the loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from redline.training.arithmetic import Arithmetic

# What may differ between a training and its continuation: how long it lasts, and what is said and kept on the way.
FREE_TO_CHANGE = frozenset(
    {"steps", "minutes", "log_every", "validate_every", "checkpoint_minutes", "keep_checkpoints", "skip_limit"}
)


class Task(ABC):
    """A model, the loss of each step, and how to judge what it has learnt.

    `model` holds the weights that are trained, in fp32. `loss(step, part)` draws the batch of that step itself, from
    the seed and the step alone, so that a training that is resumed sees what it would have seen; the losses of a
    step's `parts` add up to the step's. `identity` holds, as JSON can, what makes a checkpoint this training's.
    """

    model: nn.Module
    unit: str
    items_per_step: int
    parts: int = 1
    # What most products are computed in.
    precision: str = "fp32"
    # Arithmetic of an item, forward and backward, as the model's shape demands it; 0 when nobody has counted.
    flops_per_item: float = 0.0

    @property
    def averaged(self) -> nn.Module:
        """What an average is kept of, where one is: all of `model`, or the part of it that is the result."""
        return self.model

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic()

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Fresh, over the weights of `model`."""

    @abstractmethod
    def loss(self, step: int, part: int = 0) -> Tensor: ...

    def backward(self, step: int, part: int, arithmetic: Arithmetic) -> Tensor:
        """Leaves the gradients of a part on the weights, and gives its loss."""
        loss = self.loss(step, part)
        arithmetic.backward(loss)
        return loss.detach()

    def around(self) -> AbstractContextManager[object]:
        """Entered around the passes of a step, forward and backward."""
        return nullcontext()

    def penalties(self, step: int) -> tuple[str, ...]:
        """What that step's loss holds beside what the model is judged by."""
        return ()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Figures by name, of a model like `model` in evaluation mode; none when there is nothing to use."""
        return {}
