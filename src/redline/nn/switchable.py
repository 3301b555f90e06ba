"""Base classes of modules that have more than one implementation of their operation."""

import torch
from torch import Tensor, nn

from redline.ops.dispatch import choose


class SwitchableModule(nn.Module):
    """Runs plain PyTorch by default; with `implementation = "auto"`, the fastest kernel that supports the input."""

    implementation: str = "reference"

    def active_implementation(self) -> str:
        """Returns the implementation that runs on inputs with the device and dtype of the module's weights."""
        raise NotImplementedError

    def pack(self, device: torch.device) -> None:
        """Prepares the weights for fast inference on this device. Most modules need no preparation."""


class DispatchedModule(SwitchableModule):
    """A switchable module that leaves the choice to the dispatch of the op that it calls."""

    op: str

    def active_implementation(self) -> str:
        weight = next(self.parameters())
        return choose(self.op, self.implementation, weight.device, lambda: _why_not(weight))


def _why_not(tensor: Tensor) -> str:
    from redline.ops.kernel import why_not  # imported here because it imports Triton

    return why_not(tensor)
