"""Matrix multiplication of a few rows with Triton kernels, registered as a custom op for torch.compile.

Reading the weight takes most of the time, so each program reads a few rows of the weight. If that makes fewer programs
than multiprocessors, the rows are split along K (split-K), and the partial sums of the splits are added afterwards in a
fixed order, so results are deterministic. Blocks that lie inside a split are loaded without a mask, because row indices
are clamped to the last row; so a thread can load 16 bytes at once if the alignment allows it.

The int8 ops use `product` too. `x` is (M, K), `w` (N, K), `out` (M, N), `partial` (splits, M, N); `share` is the number
of features per split. The sums are multiplied by `x_scale` of the row and `w_scale` of the output, if given, before the
bias is added. An int8 weight is converted to the dtype of a floating-point x when it is loaded. If x is int8 too, the
sums are exact int32.

M: rows, K: features, N: outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.small_matmul.tiles import Cut, Tiles, cut_depth, shape_of, tiles_for

_MOST_ROWS = 16
_FINISH_BLOCK = 256


def why_not(x: Tensor, w: Tensor) -> str:
    if len(x) > _MOST_ROWS:
        return f"at most {_MOST_ROWS} rows are supported, not {len(x)}"
    return kernel.why_not(x) or kernel.why_not(w)


@triton.jit
def _finish(sums, m, n, inside, ends, HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scales the sums, adds the bias and stores. Row and column indices m and n broadcast to the shape of `sums`."""
    x_scale, w_scale, bias, out, columns, x_scale_stride = ends
    value = sums.to(tl.float32)
    if HAS_X_SCALE:
        value *= tl.load(x_scale + m * x_scale_stride, mask=inside, other=0.0)
    if HAS_W_SCALE:
        value *= tl.load(w_scale + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * columns + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _as_fp32(number):
    """Converts to fp32. Inserting an int8 into the mantissa of 2²³ + 128 is faster than the hardware conversion."""
    if number.dtype == tl.int8:
        bits = number.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        value = bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        value = number.to(tl.float32)
    return value


@triton.jit
def vector_kernel(
    x, w, x_scale, w_scale, bias, out, partial, columns, depth, w_stride, share, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the result of one row of x. Each thread sums its own products; the sums are reduced once at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, depth)
    whole = first + (last - first) // BLOCK_K * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    rows = w + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(first, whole, BLOCK_K):
        # Each element of the weight is used once, while x is used by every program and should stay in the cache.
        weight = _as_fp32(tl.load(rows + start, eviction_policy="evict_first"))
        sums += weight * tl.load(x + start + k).to(tl.float32)[None, :]
    if whole < last:
        inside = whole + k < last
        weight = _as_fp32(tl.load(rows + whole, mask=inside[None, :], other=0))
        sums += weight * tl.load(x + whole + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if IS_SHARED:
        tl.store(partial + tl.program_id(1).to(tl.int64) * columns + n, total, mask=n < columns)
    else:
        ends = (x_scale, w_scale, bias, out, columns, x_scale_stride)
        _finish(total, tl.zeros_like(n), n, n < columns, ends, HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS)


@triton.jit
def block_kernel(
    x, w, x_scale, w_scale, bias, out, partial, rows, columns, depth, x_stride, w_stride, share, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SHARED: tl.constexpr,
    IS_INTEGER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the results of up to BLOCK_M rows of x with tensor cores."""
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, depth)
    whole = first + (last - first) // BLOCK_K * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_rows = w + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_INTEGER else tl.float32)
    for start in range(first, whole, BLOCK_K):
        left = tl.load(x_rows + start)
        right = tl.load(w_rows + start).to(x.dtype.element_ty)
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION, out_dtype=sums.dtype)
    if whole < last:
        inside = (whole + k < last)[None, :]
        left = tl.load(x_rows + whole, mask=inside, other=0)
        right = tl.load(w_rows + whole, mask=inside, other=0).to(x.dtype.element_ty)
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION, out_dtype=sums.dtype)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    if IS_SHARED:
        place = (tl.program_id(1).to(tl.int64) * rows + m[:, None]) * columns + n[None, :]
        tl.store(partial + place, sums, mask=inside)
    else:
        ends = (x_scale, w_scale, bias, out, columns, x_scale_stride)
        _finish(sums, m[:, None], n[None, :], inside, ends, HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS)


@triton.jit
def finish_kernel(
    partial, x_scale, w_scale, bias, out, rows, columns, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums in order, scales them and adds the bias."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * columns
    sums = tl.load(partial + place, mask=inside, other=0)
    for index in range(1, SHARES):
        sums += tl.load(partial + index * rows * columns + place, mask=inside, other=0)
    ends = (x_scale, w_scale, bias, out, columns, x_scale_stride)
    _finish(sums, place // columns, place % columns, inside, ends, HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS)


def empty_product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=dtype, device=x.device)


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> Tensor:
    """Returns (x · wᵀ) · x_scale · w_scale + bias. `x_scale` has one element, or one per row."""
    x, w = kernel.rows_contiguous(x), kernel.rows_contiguous(w)
    (rows, depth), columns = x.shape, w.shape[0]
    is_integer = x.dtype == torch.int8
    is_vector = rows == 1 and not is_integer
    tiles = tiles_for(shape_of(rows, columns, depth, x.element_size(), w.element_size()))
    blocks = -(-columns // tiles.columns)
    cut = cut_depth(blocks * -(-rows // tiles.rows), depth, tiles.depth, w.element_size())
    out = empty_product(x, w, out_dtype)
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
        kernel.launch(finish_kernel, grid, *arguments, **constants, SHARES=cut.shares, BLOCK=_FINISH_BLOCK, num_warps=2)
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
        kernel.launch(vector_kernel, (blocks, cut.shares), *pointers, *sizes, **constants)
        return
    constants |= {
        "BLOCK_M": tiles.rows,
        "IS_INTEGER": x.dtype == torch.int8,
        "PRECISION": kernel.dot_precision(x.dtype),
    }
    sizes = (rows, columns, depth, x.stride(0), w.stride(0), cut.share, scale_stride)
    kernel.launch(block_kernel, (blocks, cut.shares, -(-rows // tiles.rows)), *pointers, *sizes, **constants)


@kernel.custom_op("small_matmul", lambda x, w, *_: empty_product(x, w, x.dtype))
def small_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the same as the reference. Sums are fp32 for every dtype."""
    return product(x, w, bias, x.dtype)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the gradients with PyTorch. The kernels are made for decoding, which needs no gradients."""
    x, w = ctx.saved_tensors
    # An omitted bias is missing from needs_input_grad.
    of_x, of_w, of_bias = (*ctx.needs_input_grad, False)[:3]
    return grad @ w if of_x else None, grad.t() @ x if of_w else None, grad.sum(0) if of_bias else None


kernel.differentiate(small_matmul, _differentiate, saved=lambda inputs, output: inputs[:2])
