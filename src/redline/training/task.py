"""The interface between a kind of model and the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from redline.training.arithmetic import Arithmetic

# Settings that may change on resume: duration, logging and checkpoints.
FREE_TO_CHANGE = frozenset(
    {"steps", "minutes", "log_every", "validate_every", "checkpoint_minutes", "keep_checkpoints", "skip_limit"}
)


def settings_except(free: Set[str], *parts: Any) -> dict[str, Any]:
    """Returns the fields of settings that must not change on resume: all but `free` and `FREE_TO_CHANGE`."""
    free = FREE_TO_CHANGE | free
    return {name: value for part in parts for name, value in asdict(part).items() if name not in free}


class Task(ABC):
    """A model, the loss of each step, and the validation.

    `model` holds the trained weights in fp32. `loss(step, part)` draws the batch from the seed and the step alone, so
    that a resumed run sees the same batches; the losses of a step's `parts` add up to its loss. `identity`
    is a JSON object: a checkpoint can be resumed only by a task with the same identity.
    """

    model: nn.Module
    unit: str
    items_per_step: int
    parts: int = 1
    # The precision of most matrix products.
    precision: str = "fp32"
    # FLOP per item of forward and backward pass; 0 if unknown.
    flops_per_item: float = 0.0

    @property
    def averaged(self) -> nn.Module:
        """The module that is averaged, validated and saved as the result: all of `model`, or a part."""
        return self.model

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic()

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Returns a new optimizer over the weights of `model`."""

    @abstractmethod
    def loss(self, step: int, part: int = 0) -> Tensor: ...

    def backward(self, step: int, part: int, arithmetic: Arithmetic) -> Tensor:
        """Accumulates the gradients of a part and returns its loss."""
        loss = self.loss(step, part)
        arithmetic.backward(loss)
        return loss.detach()

    def around(self) -> AbstractContextManager[object]:
        """Returns a context manager around the forward and backward passes of a step."""
        return nullcontext()

    def penalties(self, step: int) -> tuple[str, ...]:
        """Returns the names of the terms in this step's loss that the validation loss does not have."""
        return ()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns validation metrics by name for a model in evaluation mode; an empty dict without validation data."""
        return {}
