"""Matrix multiplication with int8 weights through the kernels of `small_matmul`, without a gradient.

M: rows, K: features, N: outputs.
"""

import torch
from torch import Tensor

from redline.ops.kernel import INTERPRETED
from redline.ops.small_matmul.triton import product

__all__ = ["INTERPRETED", "int8_matmul", "weight_only_matmul"]


def int8_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    x_scale: Tensor,
    w_scale_N: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Computes the reference function with exact int32 sums and fp32 scales and bias."""
    return _int8(x_MK, w_NK, x_scale, w_scale_N, bias_N, out_dtype)


def weight_only_matmul(x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Computes the reference function with fp32 sums, scales and bias, rounded once."""
    return _weight_only(x_MK, w_NK, w_scale_N, bias_N)


@torch.library.custom_op("redline::int8_matmul", mutates_args=())
def _int8(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return product(x, w, bias, out_dtype, x_scale, w_scale)


@_int8.register_fake
def _(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype, device=x.device)


@torch.library.custom_op("redline::weight_only_matmul", mutates_args=())
def _weight_only(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, w, bias, x.dtype, None, w_scale)


@_weight_only.register_fake
def _(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
