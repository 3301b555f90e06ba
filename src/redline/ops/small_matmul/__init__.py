"""A linear layer for the few rows of decoding, whose speed is limited by reading the weight.

M: rows, K: features, N: outputs.
"""

from torch import Tensor

from redline.ops.checks import check_same_device, check_same_dtype, check_sizes
from redline.ops.dispatch import run
from redline.ops.small_matmul import reference
from redline.ops.small_matmul.tiles import beats_cublas, shape_of


def small_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, implementation: str = "auto") -> Tensor:
    """Returns x · wᵀ + bias; differentiable. `auto` uses the kernels for shapes for which they beat `F.linear`.

    The kernels support up to 16 rows in bf16, fp16 or fp32. They accumulate in fp32 and are deterministic.
    """
    op = "small_matmul"
    check_sizes(op, x_MK=x_MK, w_NK=w_NK, bias_N=bias_N)
    check_same_device(op, x_MK=x_MK, w_NK=w_NK, bias_N=bias_N)
    check_same_dtype(op, x_MK=x_MK, w_NK=w_NK, bias_N=bias_N)
    (rows, depth), size = x_MK.shape, x_MK.element_size()
    # Selects the reference without a warning, because cuBLAS is faster for these shapes.
    if implementation == "auto" and size <= 4 and not beats_cublas(shape_of(rows, w_NK.shape[0], depth, size, size)):
        implementation = "reference"
    return run(op, implementation, (x_MK, w_NK), reference.small_matmul, x_MK, w_NK, bias_N)
