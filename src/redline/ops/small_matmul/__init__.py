"""A linear layer for the few rows of decoding, whose speed is limited by reading the weight.

`reference.py` is the specification in plain PyTorch; `triton.py` has the kernels.

M: rows, K: features, N: outputs.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops import dispatch
from redline.ops.checks import check_same_device, check_same_dtype, check_shape
from redline.ops.small_matmul import reference
from redline.ops.small_matmul.tiles import beats_cublas, shape_of

__all__ = ["MOST_ROWS", "small_matmul"]

MOST_ROWS = 16


def small_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, implementation: str = "auto") -> Tensor:
    """Returns x · wᵀ + bias; differentiable. `auto` takes the kernels where they are faster than `F.linear`.

    The kernels support up to 16 rows in bf16, fp16 or fp32. They accumulate in fp32 and are deterministic.
    """
    op = "small_matmul"
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1]:
        shapes = f"{tuple(x_MK.shape)} and {tuple(w_NK.shape)}"
        raise ModelError(f"{op}: x_MK must be (M, K) and w_NK (N, K), not {shapes}.")
    if bias_N is not None:
        check_shape(op, "bias_N", bias_N, w_NK.shape[:1])
    check_same_device(op, x_MK=x_MK, w_NK=w_NK, bias_N=bias_N)
    check_same_dtype(op, x_MK=x_MK, w_NK=w_NK, bias_N=bias_N)
    (rows, depth), size = x_MK.shape, x_MK.element_size()
    # No warning: cuBLAS is faster for these shapes.
    if implementation == "auto" and size <= 4 and not beats_cublas(shape_of(rows, w_NK.shape[0], depth, size, size)):
        implementation = "reference"

    def why_not() -> str:
        from redline.ops import kernel

        if rows > MOST_ROWS:
            return f"at most {MOST_ROWS} rows are supported, not {rows}"
        return kernel.why_not(x_MK) or kernel.why_not(w_NK)

    if dispatch.choose(op, implementation, x_MK.device, why_not) == "reference":
        return reference.small_matmul(x_MK, w_NK, bias_N)
    from redline.ops.small_matmul import triton

    return triton.small_matmul(x_MK, w_NK, bias_N)
