"""A module that has its operation in more than one implementation."""

from torch import nn


class Choosing(nn.Module):
    """Plain PyTorch by default; `implementation = "auto"` takes the fastest that can run where the input is."""

    implementation: str = "reference"

    def chosen(self) -> str:
        """The implementation that takes inputs of the kind that the module's own weights are."""
        raise NotImplementedError

    def pack(self) -> None:
        """Puts weights into the order that the fast implementation wants, for inference alone; most need no other."""
