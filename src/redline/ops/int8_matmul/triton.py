"""Matrix multiplication with int8 weights through the kernels of `small_matmul`, without a gradient.

M: rows, K: features, N: outputs.
"""

from typing import Any

import torch
from torch import Tensor

from redline.ops.kernel import INTERPRETED
from redline.ops.small_matmul.triton import product

__all__ = ["INTERPRETED", "int8_matmul", "weight_only_matmul"]


@torch.library.custom_op("redline::int8_matmul", mutates_args=())
def int8_matmul(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Computes the reference function with exact int32 sums and fp32 scales and bias."""
    return product(x, w, bias, out_dtype, x_scale, w_scale)


@int8_matmul.register_fake
def _(x: Tensor, w: Tensor, *others: Any) -> Tensor:
    out_dtype = others[3] if len(others) == 4 else torch.bfloat16
    return torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype, device=x.device)


@torch.library.custom_op("redline::weight_only_matmul", mutates_args=())
def weight_only_matmul(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the reference function with fp32 sums, scales and bias, rounded once."""
    return product(x, w, bias, x.dtype, None, w_scale)


@weight_only_matmul.register_fake
def _(x: Tensor, w: Tensor, *_: object) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
