"""RMSNorm, optionally fused with the residual addition before it."""

import torch
from torch import Tensor, nn

from redline.nn.switchable import DispatchedModule
from redline.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(DispatchedModule):
    op = "rms_norm"

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.implementation)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the normalized sum x + residual, and the sum itself. Without a residual the sum is x."""
        if residual is None:
            return self(x), x
        if torch.is_autocast_enabled(x.device.type):
            # Under autocast x may be in half precision; the sum is computed in the precision of the residual.
            x = x.to(residual.dtype)
        return add_rms_norm(x, residual, self.weight, self.eps, self.implementation)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
