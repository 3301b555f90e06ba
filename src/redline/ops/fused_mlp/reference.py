"""Reference of an MLP whose second linear layer reads the input concatenated with the hidden activations.

If a transformer block returns x + F·h with h = gelu(W·norm(x)), and a linear layer A follows, their result is
A·x + (A·F)·h. So the outer weight is [A | A·F], and F is never applied on its own.

M: rows, K: input channels, H: hidden channels, J: K + H, N: output columns, P: blocks of columns with own moments.
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
    """Returns residual + share · activation([x | gelu(norm(x) @ inner.T + inner_bias)] @ outer.T + outer_bias)."""
    hidden_MH = fused_linear(x_MK, inner_HK, inner_bias_H, moments_P2M, channels, eps, "gelu")
    both_MJ = torch.cat((x_MK, hidden_MH), -1)
    return fused_linear(both_MJ, outer_NJ, outer_bias_N, activation=activation, residual_MN=residual_MN, share=share)
