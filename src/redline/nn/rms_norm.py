"""Root-mean-square norm, with the addition that comes before it in a residual stream."""

import torch
from torch import Tensor, nn

from redline.nn.switchable import DispatchedModule
from redline.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(DispatchedModule):
    op = "RMSNorm"

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.implementation)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum; without a residual the sum is x itself."""
        if residual is None:
            return self(x), x
        if torch.is_autocast_enabled(x.device.type):
            # Branches come in half precision; what they are added to stays as exact as it was.
            x = x.to(residual.dtype)
        return add_rms_norm(x, residual, self.weight, self.eps, self.implementation)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
