"""Matrix multiplication with int8 weights through the kernels of `small_matmul`, without a gradient.

M: rows, K: features, N: outputs.
"""

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.kernel import why_not as why_not
from redline.ops.small_matmul.triton import empty_product, product


@kernel.custom_op("int8_matmul", lambda x, w, *others: empty_product(x, w, *others[3:] or (torch.bfloat16,)))
def int8_matmul(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Computes the same as the reference with exact int32 sums and fp32 scales and bias."""
    return product(x, w, bias, out_dtype, x_scale, w_scale)


@kernel.custom_op("weight_only_matmul", lambda x, w, *_: empty_product(x, w, x.dtype))
def weight_only_matmul(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the same as the reference with fp32 sums, scales and bias, rounded once."""
    return product(x, w, bias, x.dtype, None, w_scale)
