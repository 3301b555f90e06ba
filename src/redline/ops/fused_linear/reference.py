"""Reference of a linear layer with an optional LayerNorm before it and an activation and a residual after it.

The LayerNorm has no weights, because they are folded into those of the linear layer. Rows are normalized by moments,
their sums and sums of squares, which the op that wrote the rows has computed. The moments (P, 2, M) are summed over P
parts, each for a block of channels, so rows that are extended by new channels need no second read of the old ones.
Padding channels are zero; `channels` is the number of channels without padding.

M: rows, K: input channels, N: output columns, P: parts of the moments.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("", "gelu", "leaky_relu")
SLOPE = 0.2  # of leaky_relu
# Columns per part of the moments.
MOMENT_COLUMNS = 128


def fused_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor,
    moments_P2M: Tensor | None = None,
    channels: int = 0,
    eps: float = 1e-5,
    activation: str = "",
    residual_MN: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """Returns residual + share · activation(normalized(x) @ weight.T + bias)."""
    if moments_P2M is not None:
        total, squares = moments_P2M.to(torch.promote_types(x_MK.dtype, torch.float32)).sum(0)
        mean = total / channels
        scale = ((squares / channels - mean * mean).clamp_min(0) + eps).rsqrt()
        x_MK = ((x_MK - mean[:, None]) * scale[:, None]).to(weight_NK.dtype)
    y_MN = F.linear(x_MK, weight_NK, bias_N)
    if activation == "gelu":
        y_MN = F.gelu(y_MN)
    elif activation == "leaky_relu":
        y_MN = F.leaky_relu(y_MN, SLOPE)
    return y_MN if residual_MN is None else residual_MN + share * y_MN


def moments(x_MN: Tensor) -> Tensor:
    """Returns the sums and sums of squares of the rows, (2, M)."""
    wide = x_MN.to(torch.promote_types(x_MN.dtype, torch.float32))
    return torch.stack((wide.sum(-1), wide.square().sum(-1)))


def moment_parts(columns: int) -> int:
    """Returns the number of parts of the moments of this many columns."""
    return -(-columns // MOMENT_COLUMNS)


def moments_in_parts(x_MN: Tensor) -> Tensor:
    """Returns the moments of whole rows, (parts, 2, M)."""
    return torch.stack([moments(block) for block in x_MN.split(MOMENT_COLUMNS, -1)])
