"""Products with int8 weights, in plain PyTorch: the specification.

Shapes: M rows of K features, N outputs. A weight's number is `w_scale` of its output times its int8; where the rows are
int8 too, theirs are `x_scale` of the row times their int8.
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
    """(x · wᵀ) · x_scale · w_scale + bias; in fp64, in which sums of int8 products are exact, and rounded once."""
    sums = x_MK.double() @ w_NK.double().t()
    out = sums * x_scale.double().reshape(-1, 1) * w_scale_N.double()
    return (out if bias_N is None else out + bias_N.double()).to(out_dtype)


def weight_only_matmul(x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · (w · w_scale)ᵀ + bias in the dtype of x, to which the weight is rounded; fp16 could not hold w unscaled."""
    exact = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    weight = (w_NK.to(exact) * w_scale_N.to(exact)[:, None]).to(x_MK.dtype)
    return F.linear(x_MK, weight, None if bias_N is None else bias_N.to(x_MK.dtype))
