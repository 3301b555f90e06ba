"""A linear layer with what stands around it in a transformer: the specification.

M rows of K channels become M rows of N. Before the product, rows may be normalized as LayerNorm does (without its
weights, which fold into the linear layer's); after it come an activation and a residual, in that order. Rows are
normalized by moments, their sums and sums of squares, which whoever wrote the rows has left: (P, 2, M), to be added up
over P parts, each of a block of channels. So rows that grow by new channels need no second look at the old ones.
Channels that only fill up a row are zero, and `channels` counts those that are not such.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("", "gelu", "leaky_relu")
SLOPE = 0.2  # of the leaky one
# Columns whose sums make one part of the moments.
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
    """residual + share · activation(normalized(x) @ weight.T + bias)."""
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
    """Sums and sums of squares of the rows, (2, M)."""
    wide = x_MN.to(torch.promote_types(x_MN.dtype, torch.float32))
    return torch.stack((wide.sum(-1), wide.square().sum(-1)))


def moment_parts(columns: int) -> int:
    """How many parts the moments of so many columns have."""
    return -(-columns // MOMENT_COLUMNS)


def moments_in_parts(x_MN: Tensor) -> Tensor:
    """Those of whole rows, (parts, 2, M)."""
    return torch.stack([moments(block) for block in x_MN.split(MOMENT_COLUMNS, -1)])
