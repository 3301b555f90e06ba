"""Products of int8 rows and weights by torch's own int8 product (on a GPU, cuBLAS), which is good at many rows."""

import torch
from torch import Tensor


def int8_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    x_scale: Tensor,
    w_scale_N: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The same as the reference, but for rounding in fp32: scales and bias are applied to its exact int32 sums."""
    out = torch._int_mm(x_MK, w_NK.t()).float() * x_scale.reshape(-1, 1) * w_scale_N
    return (out if bias_N is None else out + bias_N.float()).to(out_dtype)


def why_not(x_MK: Tensor, w_NK: Tensor) -> str:
    """Why torch would refuse, or nothing."""
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    if x_MK.is_cuda and rows <= 16:
        return f"it takes more than 16 rows, not {rows}"
    if x_MK.is_cuda and (depth % 8 or columns % 8 or not depth or not columns):
        return f"it takes depths and outputs that are multiples of 8, not {depth} and {columns}"
    return ""
