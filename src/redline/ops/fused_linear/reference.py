"""Reference of a linear layer with an optional LayerNorm before it and an activation and a residual after it.

The LayerNorm has no weights, because they are folded into those of the linear layer. Its mean and variance come from
the moments of each row, its sum and its sum of squares, which the op that wrote the row has computed. Each of P blocks
of columns has its own moments (P, 2, M), which are added when they are used. So if a row is extended by new columns,
the old columns are not read again. Padding channels are zero; `channels` is the number of channels without padding.

M: rows, K: input channels, N: output columns, P: blocks of 128 columns, each of which has its own moments.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("", "gelu", "leaky_relu")
SLOPE = 0.2  # the negative slope of leaky_relu
# Moments are computed separately for each block of this many columns.
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
    """Returns residual + share · y with y = activation(normalized(x) @ weight.T + bias), or y without a residual."""
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
    """Returns the sum and the sum of squares of each row, (2, M)."""
    wide = x_MN.to(torch.promote_types(x_MN.dtype, torch.float32))
    return torch.stack((wide.sum(-1), wide.square().sum(-1)))


def moment_parts(columns: int) -> int:
    """Returns the number of blocks with separate moments, P, for this many columns."""
    return -(-columns // MOMENT_COLUMNS)


def moments_in_parts(x_MN: Tensor) -> Tensor:
    """Returns the moments of each block of columns, (P, 2, M)."""
    return torch.stack([moments(block) for block in x_MN.split(MOMENT_COLUMNS, -1)])
