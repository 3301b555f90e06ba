"""A linear layer for few rows, as decoding has them: as fast as the weight can be read."""

from torch import Tensor

from redline.errors import ModelError
from redline.ops import dispatch
from redline.ops.small_matmul import reference
from redline.ops.small_matmul.tiles import is_kept, shape_of

__all__ = ["MOST_ROWS", "small_matmul"]

MOST_ROWS = 16


def small_matmul(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, *, implementation: str = "auto") -> Tensor:
    """x · wᵀ + bias, differentiable. `auto` takes the kernels where they are faster, else torch's linear layer.

    The kernels are for up to 16 rows in bf16, fp16 or fp32; sums are fp32, and the same input gives the same bits.
    """
    _check(x_MK, w_NK, bias_N)
    (rows, depth), size = x_MK.shape, x_MK.element_size()
    # Not a fallback: these are the sizes that cuBLAS is faster at.
    if implementation == "auto" and size <= 4 and not is_kept(shape_of(rows, w_NK.shape[0], depth, size, size)):
        implementation = "reference"

    def why_not() -> str:
        from redline.ops import kernel

        if rows > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} rows, not {rows}"
        return kernel.why_not(x_MK) or kernel.why_not(w_NK)

    if dispatch.choose("small matmul", implementation, x_MK.device, why_not) == "reference":
        return reference.small_matmul(x_MK, w_NK, bias_N)
    from redline.ops.small_matmul import triton

    return triton.small_matmul(x_MK, w_NK, bias_N)


def _check(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> None:
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1]:
        shapes = f"{tuple(x_MK.shape)} and {tuple(w_NK.shape)}"
        raise ModelError(f"small matmul takes rows (M, K) and a weight (N, K), not {shapes}.")
    if bias_N is not None and bias_N.shape != w_NK.shape[:1]:
        raise ModelError(f"{len(w_NK)} outputs need as many biases, not {tuple(bias_N.shape)}.")
    for name, tensor in (("weight", w_NK), ("bias", bias_N)):
        if tensor is None:
            continue
        if tensor.device != x_MK.device:
            raise ModelError(f"the {name} is on {tensor.device}, but the rows are on {x_MK.device}.")
        if tensor.dtype != x_MK.dtype:
            raise ModelError(f"the {name} is {tensor.dtype}, but the rows are {x_MK.dtype}.")
