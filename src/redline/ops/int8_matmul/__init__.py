"""Products with int8 weights, for inference: with int8 rows, or (for decoding, where rows are few) rows as they are."""

import torch
from torch import Tensor

from redline.errors import MachineError, ModelError
from redline.ops import dispatch
from redline.ops.int8_matmul import int_mm, reference
from redline.ops.small_matmul.tiles import Shape, is_kept, shape_of

__all__ = ["IMPLEMENTATIONS", "int8_matmul", "weight_only_matmul"]

IMPLEMENTATIONS = ("auto", "reference", "int_mm", "triton")

# Deeper sums of products of int8 can pass the largest int32.
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
    """(x · wᵀ) · x_scale · w_scale + bias of int8 rows and weights; inference only, it has no gradient.

    The scales are fp32: one for each output, and one for each row or one for all. On a GPU `auto` takes the Triton
    kernel for few rows and for sizes that torch's own int8 product refuses, else that (`int_mm`).
    """
    _check(x_MK, w_NK, w_scale_N, bias_N, torch.int8)
    if x_scale.dtype != torch.float32 or x_scale.numel() not in (1, len(x_MK)) or x_scale.ndim > 1:
        found = f"{tuple(x_scale.shape)}, {x_scale.dtype}"
        raise ModelError(f"the scale of {len(x_MK)} int8 rows is one fp32 number, or one for each, not {found}.")
    if x_scale.device != x_MK.device:
        raise ModelError(f"the scale of the rows is on {x_scale.device}, but the rows are on {x_MK.device}.")
    if x_MK.shape[1] > _LARGEST_DEPTH:
        raise ModelError(f"int8 products of {x_MK.shape[1]} features do not fit int32 sums: {_LARGEST_DEPTH} do.")
    if out_dtype not in _FLOATS:
        raise ModelError(f"int8 matmul gives fp16, bf16 or fp32, not {out_dtype}.")
    _refuse_gradients(x_scale, w_scale_N, bias_N)
    arguments = (x_MK, w_NK, x_scale, w_scale_N, bias_N, out_dtype)
    refused = int_mm.why_not(x_MK, w_NK)
    if implementation == "int_mm" and refused:
        raise MachineError(f"int8 matmul by torch cannot run: {refused}.")
    # Not a fallback: these are the sizes that cuBLAS is faster at.
    is_many = x_MK.is_cuda and not refused and not is_kept(_shape(x_MK, w_NK))
    if implementation == "auto" and is_many:
        implementation = "int_mm"
    chosen = _choose("int8 matmul", implementation, x_MK, (torch.int8,), IMPLEMENTATIONS)
    if chosen == "int_mm":
        return int_mm.int8_matmul(*arguments)
    if chosen == "reference":
        return reference.int8_matmul(*arguments)
    from redline.ops.int8_matmul import triton

    return triton.int8_matmul(*arguments)


def weight_only_matmul(
    x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None = None, *, implementation: str = "auto"
) -> Tensor:
    """(x · wᵀ) · w_scale + bias of bf16, fp16 or fp32 rows and int8 weights; inference only, it has no gradient.

    Half the bytes of a bf16 weight are read, and nothing is lost of the rows. On a GPU `auto` takes the Triton kernel
    for few rows; for many, in which reading the weight is the least, the weight is made floating-point and cuBLAS runs.
    """
    _check(x_MK, w_NK, w_scale_N, bias_N, None)
    _refuse_gradients(x_MK, w_scale_N, bias_N)
    if implementation == "auto" and x_MK.element_size() <= 4 and not is_kept(_shape(x_MK, w_NK)):
        implementation = "reference"
    if _choose("weight-only matmul", implementation, x_MK, _FLOATS, dispatch.IMPLEMENTATIONS) == "reference":
        return reference.weight_only_matmul(x_MK, w_NK, w_scale_N, bias_N)
    from redline.ops.int8_matmul import triton

    return triton.weight_only_matmul(x_MK, w_NK, w_scale_N, bias_N)


def _shape(x_MK: Tensor, w_NK: Tensor) -> Shape:
    return shape_of(x_MK.shape[0], w_NK.shape[0], w_NK.shape[1], x_MK.element_size(), 1)


def _choose(
    op: str, asked: str, x_MK: Tensor, dtypes: tuple[torch.dtype, ...], implementations: tuple[str, ...]
) -> str:
    def why_not() -> str:
        from redline.ops import kernel

        return kernel.why_not(x_MK, dtypes)

    return dispatch.choose(op, asked, x_MK.device, why_not, implementations)


def _check(
    x_MK: Tensor, w_NK: Tensor, w_scale_N: Tensor, bias_N: Tensor | None, rows_dtype: torch.dtype | None
) -> None:
    if x_MK.ndim != 2 or w_NK.ndim != 2 or x_MK.shape[1] != w_NK.shape[1]:
        shapes = f"{tuple(x_MK.shape)} and {tuple(w_NK.shape)}"
        raise ModelError(f"int8 matmul takes rows (M, K) and a weight (N, K), not {shapes}.")
    if w_NK.dtype != torch.int8 or (x_MK.dtype != rows_dtype if rows_dtype else not x_MK.is_floating_point()):
        wanted = "int8" if rows_dtype else "floating-point"
        raise ModelError(f"the product takes {wanted} rows and int8 weights, not {x_MK.dtype} and {w_NK.dtype}.")
    if w_scale_N.shape != w_NK.shape[:1] or w_scale_N.dtype != torch.float32:
        found = f"{tuple(w_scale_N.shape)}, {w_scale_N.dtype}"
        raise ModelError(f"{len(w_NK)} outputs need as many fp32 scales, not {found}.")
    if bias_N is not None and bias_N.shape != w_NK.shape[:1]:
        raise ModelError(f"{len(w_NK)} outputs need as many biases, not {tuple(bias_N.shape)}.")
    for name, tensor in (("weight", w_NK), ("scale", w_scale_N), ("bias", bias_N)):
        if tensor is not None and tensor.device != x_MK.device:
            raise ModelError(f"the {name} is on {tensor.device}, but the rows are on {x_MK.device}.")


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ModelError("products with int8 weights have no gradient: call them under torch.no_grad().")
