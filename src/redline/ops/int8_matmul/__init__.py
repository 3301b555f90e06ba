"""Matrix multiplication with int8 weights, for inference, with int8 or floating-point activations.

`triton.py` has kernels for few rows, and `int_mm.py` calls PyTorch's int8 matrix multiplication, which is faster for
many rows.

M: rows, K: features, N: outputs.
"""

import torch
from torch import Tensor

from redline.errors import MachineError, ModelError
from redline.ops.checks import check_floating, check_no_gradient, check_same_device, check_sizes
from redline.ops.dispatch import kernels, run, select
from redline.ops.int8_matmul import int_mm, reference
from redline.ops.small_matmul.tiles import Shape, beats_cublas, shape_of

IMPLEMENTATIONS = ("auto", "reference", "int_mm", "triton")

# A sum over more features than this can exceed the range of int32.
_LARGEST_DEPTH = 2**17 - 1
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def int8_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    x_scale: Tensor,
    w_scale_N: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> Tensor:
    """Returns (x · wᵀ) · x_scale · w_scale + bias of int8 activations and weights. It has no gradient.

    The scales are fp32: `w_scale_N` per output, `x_scale` per row or one for all rows. On a GPU `auto` uses the Triton
    kernel for few rows and for shapes that PyTorch's int8 multiplication (`int_mm`) does not support, else `int_mm`.
    """
    op = "int8_matmul"
    _check(op, x_MK, w_NK, w_scale_N, bias_N)
    if x_MK.dtype != torch.int8:
        raise ModelError(f"{op}: x_MK must be int8, not {x_MK.dtype}.")
    if x_scale.dtype != torch.float32 or x_scale.numel() not in (1, len(x_MK)) or x_scale.ndim > 1:
        found = f"{tuple(x_scale.shape)} {x_scale.dtype}"
        raise ModelError(f"{op}: x_scale must be one float32 number or {(len(x_MK),)} float32, not {found}.")
    check_same_device(op, x_MK=x_MK, x_scale=x_scale)
    if x_MK.shape[1] > _LARGEST_DEPTH:
        raise ModelError(
            f"{op}: x_MK has {x_MK.shape[1]} features, whose int32 sums could overflow (limit: {_LARGEST_DEPTH})."
        )
    if out_dtype not in _FLOATS:
        raise ModelError(f"{op}: out_dtype must be float16, bfloat16 or float32, not {out_dtype}.")
    check_no_gradient(op, x_scale=x_scale, w_scale_N=w_scale_N, bias_N=bias_N)
    arguments = (x_MK, w_NK, x_scale, w_scale_N, bias_N, out_dtype)
    refused = int_mm.why_not(x_MK, w_NK)
    if implementation == "int_mm" and refused:
        raise MachineError(f"{op}: torch._int_mm cannot run: {refused}.")
    # Selects `int_mm` without a warning, because cuBLAS is faster for these shapes.
    is_many = x_MK.is_cuda and not refused and not beats_cublas(_shape(x_MK, w_NK))
    if implementation == "auto" and is_many:
        implementation = "int_mm"
    chosen = select(op, implementation, x_MK, (torch.int8,), implementations=IMPLEMENTATIONS)
    module = {"int_mm": int_mm, "reference": reference}.get(chosen)
    return (module or kernels(op)).int8_matmul(*arguments)


def weight_only_matmul(
    x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None = None, *, implementation: str = "auto"
) -> Tensor:
    """Returns (x · wᵀ) · w_scale + bias of bf16, fp16 or fp32 activations and int8 weights. It has no gradient.

    The kernel reads half as many bytes as for a bf16 weight, and does not quantize the activations. On a GPU `auto`
    uses the kernel for few rows. For many rows, reading the weight takes only a small part of the time, so `auto` uses
    the reference, which dequantizes the weight.
    """
    op = "weight_only_matmul"
    _check(op, x_MK, w_NK, w_scale_N, bias_N)
    check_floating(op, x_MK=x_MK)
    check_no_gradient(op, x_MK=x_MK, w_scale_N=w_scale_N, bias_N=bias_N)
    if implementation == "auto" and x_MK.element_size() <= 4 and not beats_cublas(_shape(x_MK, w_NK)):
        implementation = "reference"
    arguments = (x_MK, w_NK, w_scale_N, bias_N)
    return run(op, implementation, (x_MK, _FLOATS), reference.weight_only_matmul, *arguments)


def _shape(x_MK: Tensor, w_NK: Tensor) -> Shape:
    return shape_of(x_MK.shape[0], w_NK.shape[0], w_NK.shape[1], x_MK.element_size(), 1)


def _check(op: str, x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None) -> None:
    check_sizes(op, x_MK=x_MK, w_NK=w_NK, w_scale_N=w_scale_N, bias_N=bias_N)
    if w_NK.dtype != torch.int8:
        raise ModelError(f"{op}: w_NK must be int8, not {w_NK.dtype}.")
    if w_scale_N.dtype != torch.float32:
        raise ModelError(f"{op}: w_scale_N must be float32, not {w_scale_N.dtype}.")
    check_same_device(op, x_MK=x_MK, w_NK=w_NK, w_scale_N=w_scale_N, bias_N=bias_N)
