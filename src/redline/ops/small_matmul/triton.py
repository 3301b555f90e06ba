"""Matrix multiplication of a few rows with Triton kernels, registered as a custom op for torch.compile.

`product` also serves the int8 ops. It chooses the tiles, splits K if there are fewer programs than multiprocessors, and
adds the splits in a fixed order, so results are deterministic.

M: rows, K: features, N: outputs.
"""

from typing import Any

import torch
from torch import Tensor

from redline.ops.kernel import INTERPRETED, dot_precision, launch, rows_contiguous
from redline.ops.small_matmul.tiles import Cut, Tiles, cut_depth, shape_of, tiles_for
from redline.ops.small_matmul.triton_kernels import block_kernel, finish_kernel, vector_kernel

__all__ = ["INTERPRETED", "product", "small_matmul"]

_FINISH_BLOCK = 256


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> Tensor:
    """Returns (x · wᵀ) · x_scale · w_scale + bias. `x_scale` has one element, or one per row."""
    x, w = rows_contiguous(x), rows_contiguous(w)
    (rows, depth), columns = x.shape, w.shape[0]
    is_integer = x.dtype == torch.int8
    is_vector = rows == 1 and not is_integer
    tiles = tiles_for(shape_of(rows, columns, depth, x.element_size(), w.element_size()))
    blocks = -(-columns // tiles.columns)
    cut = cut_depth(blocks * -(-rows // tiles.rows), depth, tiles.depth, w.element_size())
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    sums = torch.int32 if is_integer else torch.float32
    partial = torch.empty((cut.shares, rows, columns), dtype=sums, device=x.device) if cut.shares > 1 else out
    ends = (x_scale, w_scale, bias)
    constants: dict[str, object] = {
        name: tensor is not None for name, tensor in zip(("HAS_X_SCALE", "HAS_W_SCALE", "HAS_BIAS"), ends, strict=True)
    }
    scale_stride = 0 if x_scale is None or x_scale.numel() == 1 else 1
    pointers = (x, w, *(out if tensor is None else tensor.contiguous() for tensor in ends), out, partial)
    _launch_product(pointers, scale_stride, cut, tiles, is_vector, constants)
    if cut.shares > 1:
        grid = (-(-rows * columns // _FINISH_BLOCK),)
        arguments = (partial, *pointers[2:5], out, rows, columns, scale_stride)
        launch(finish_kernel, grid, *arguments, **constants, SHARES=cut.shares, BLOCK=_FINISH_BLOCK, num_warps=2)
    return out


def _launch_product(
    pointers: tuple[Tensor, ...],
    scale_stride: int,
    cut: Cut,
    tiles: Tiles,
    is_vector: bool,
    constants: dict[str, object],
) -> None:
    x, w = pointers[:2]
    (rows, depth), columns = x.shape, w.shape[0]
    blocks = -(-columns // tiles.columns)
    constants = constants | {
        "IS_SHARED": cut.shares > 1,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.depth,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if is_vector:
        sizes = (columns, depth, w.stride(0), cut.share, scale_stride)
        launch(vector_kernel, (blocks, cut.shares), *pointers, *sizes, **constants)
        return
    constants |= {
        "BLOCK_M": tiles.rows,
        "IS_INTEGER": x.dtype == torch.int8,
        "PRECISION": dot_precision(x.dtype),
    }
    sizes = (rows, columns, depth, x.stride(0), w.stride(0), cut.share, scale_stride)
    launch(block_kernel, (blocks, cut.shares, -(-rows // tiles.rows)), *pointers, *sizes, **constants)


@torch.library.custom_op("redline::small_matmul", mutates_args=())
def small_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the reference function. Sums are fp32 for every dtype."""
    return product(x, w, bias, x.dtype)


@small_matmul.register_fake
def _(x: Tensor, w: Tensor, *_: object) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the gradients with PyTorch. The kernels are made for decoding, which needs no gradients."""
    x, w = ctx.saved_tensors
    # An omitted bias is missing from needs_input_grad.
    of_x, of_w, of_bias = (*ctx.needs_input_grad, False)[:3]
    return grad @ w if of_x else None, grad.t() @ x if of_w else None, grad.sum(0) if of_bias else None


small_matmul.register_autograd(_differentiate, setup_context=_setup_context)
