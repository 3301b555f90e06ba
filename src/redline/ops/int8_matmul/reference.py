"""Reference of matrix multiplication with int8 weights.

M: rows, K: features, N: outputs. The value of a weight is its int8 number times `w_scale` of its output. If the
activations are int8 too, their value is the int8 number times `x_scale` of the row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def int8_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    x_scale: Tensor,
    w_scale_N: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Returns (x · wᵀ) · x_scale · w_scale + bias, computed in fp64 with exact integer sums and rounded once."""
    sums = x_MK.double() @ w_NK.double().t()
    out = sums * x_scale.double().reshape(-1, 1) * w_scale_N.double()
    return (out if bias_N is None else out + bias_N.double()).to(out_dtype)


def weight_only_matmul(x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Returns x · (w · w_scale)ᵀ + bias. The weight is scaled before it is rounded to the dtype of x."""
    exact = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    weight = (w_NK.to(exact) * w_scale_N.to(exact)[:, None]).to(x_MK.dtype)
    return F.linear(x_MK, weight, None if bias_N is None else bias_N.to(x_MK.dtype))
