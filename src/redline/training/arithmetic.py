"""Computes gradients of the weights: directly in fp32 and autocast, through a low-precision copy in bf16 and fp16.

Most steps change a weight by less than bf16 can resolve, so the optimizer updates fp32 masters. At the end of a step,
the masters are copied into the low-precision copy. Gradients are accumulated in fp32, so that summing many small
batches loses no precision. In fp16 the loss scale adapts to overflows; a model that keeps overflowing is switched to
bf16 with a warning.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.ladder.rungs.grad_scaler import AdaptiveGradScaler

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Arithmetic:
    """Computes gradients with the trained weights themselves; subclasses compute with a copy of them."""

    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients on the trained weights."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> bool:
        """Undoes the loss scaling of the gradients, once per step. Returns whether they overflowed."""
        return False

    def publish(self) -> None:
        """Called after an optimizer step: copies the trained weights into the low-precision copy, if there is one."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. The trained weights must be restored first."""
        self.publish()


class LossScale(AdaptiveGradScaler):
    """The ladder's loss scaler, extended to unscale gradients before they are clipped, and to save its state."""

    _SAVED = ("current", "steps", "skipped", "switched", "_overflows_in_a_row", "_clean_in_a_row")

    def unscale(self, optimizer: Optimizer) -> bool:
        """Divides the gradients by the loss scale, then adapts it. Returns whether a gradient was not finite."""
        self.steps += 1
        self._overflowed = not self.switched and self._unscale(optimizer)
        self.skipped += self._overflowed
        overflowed = self._overflowed
        self.update()
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class WorkingCopy(Arithmetic):
    """Computes with `model`, a low-precision copy; the original module holds the fp32 masters."""

    def __init__(self, masters: nn.Module, precision: str) -> None:
        self.precision = precision
        self.model = copy.deepcopy(masters)
        self._masters: list[Tensor] = list(masters.parameters())
        self._copies: list[Tensor] = list(self.model.parameters())
        # Buffers keep their dtype: they hold tables and counts, which must not be rounded.
        for own in self._copies:
            own.data = own.data.to(DTYPES[precision])
        self._buffers = list(zip(masters.buffers(), self.model.buffers(), strict=True))
        self.scale = LossScale(self.model) if precision == "fp16" else None

    def backward(self, loss: Tensor) -> None:
        (self.scale.scale(loss) if self.scale else loss).backward()
        with torch.no_grad():
            for master, own in zip(self._masters, self._copies, strict=True):
                if own.grad is None:
                    continue
                if master.grad is None:
                    master.grad = own.grad.to(master.dtype)
                else:
                    master.grad += own.grad
                own.grad = None

    def unscale(self, optimizer: Optimizer) -> bool:
        return self.scale.unscale(optimizer) if self.scale else False

    @torch.no_grad()
    def show(self, weights: nn.Module) -> None:
        """Loads other weights (an average) into the copy until the next `publish`."""
        torch._foreach_copy_(self._copies, list(weights.parameters()))

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_(self._copies, self._masters)
        for master, own in self._buffers:
            master.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict() if self.scale else {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scale:
            self.scale.load_state_dict(state)
            if self.scale.switched:
                self.model._apply(lambda tensor: tensor.to(torch.bfloat16) if tensor.dtype == torch.float16 else tensor)
        torch._foreach_copy_(self._copies, self._masters)
        for master, own in self._buffers:
            own.copy_(master)
