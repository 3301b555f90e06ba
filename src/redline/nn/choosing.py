"""A module that has its operation in more than one implementation."""

import torch
from torch import nn


class Choosing(nn.Module):
    """Plain PyTorch by default; `implementation = "auto"` takes the fastest that can run where the input is."""

    implementation: str = "reference"

    def chosen(self) -> str:
        """The implementation that takes inputs of the kind that the module's own weights are."""
        raise NotImplementedError

    def pack(self, device: torch.device) -> None:
        """Puts weights into the order that is fast on such a device, for inference alone; most need no other."""
