"""An MLP with a linear layer of its input and its hidden channels behind it: the specification.

Where a transformer's block ends in x + F·gelu(W·norm(x)) and a linear layer A follows, A and AF side by side are the
outer weight, and F is never applied by itself.
"""

import torch
from torch import Tensor

from redline.ops.fused_linear.reference import fused_linear


def fused_mlp(
    x_MK: Tensor,
    inner_HK: Tensor,
    inner_bias_H: Tensor,
    outer_NJ: Tensor,
    outer_bias_N: Tensor,
    moments_P2M: Tensor,
    channels: int,
    eps: float = 1e-5,
    activation: str = "",
    residual_MN: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """residual + share · activation([x | gelu(normalized(x) @ inner.T + its bias)] @ outer.T + its bias)."""
    hidden_MH = fused_linear(x_MK, inner_HK, inner_bias_H, moments_P2M, channels, eps, "gelu")
    both_MJ = torch.cat((x_MK, hidden_MH), -1)
    return fused_linear(both_MJ, outer_NJ, outer_bias_N, activation=activation, residual_MN=residual_MN, share=share)
