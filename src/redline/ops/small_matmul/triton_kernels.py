"""Triton kernels for the product of a few rows with a large weight.

Reading the weight takes most of the time, so each program reads a few whole rows of the weight, or a split of K if
there would be fewer programs than multiprocessors. The splits are added afterwards in a fixed order. Loads inside K
have no mask, and row indices are clamped to the last row, so that a thread loads 16 bytes at once where alignment
allows.

`x` is (M, K), `w` (N, K), `out` (M, N), `partial` (shares, M, N). The sums are multiplied by `x_scale` of the row and
`w_scale` of the output, if given, before the bias is added. An int8 weight is converted to the dtype of floating-point
rows when it is loaded. With int8 rows the sums are exact int32.
"""

import triton
import triton.language as tl


@triton.jit
def _finish(
    sums, m, n, inside, x_scale, w_scale, bias, out, columns, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scales, adds the bias and stores. The row and column indices `m` and `n` broadcast to the shape of `sums`."""
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
    """Computes one row of x. Each thread accumulates its own products; threads are reduced once at the end."""
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
        _finish(
            total, tl.zeros_like(n), n, n < columns, x_scale, w_scale, bias, out, columns, x_scale_stride,
            HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def block_kernel(
    x, w, x_scale, w_scale, bias, out, partial, rows, columns, depth, x_stride, w_stride, share, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SHARED: tl.constexpr,
    IS_INTEGER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes up to BLOCK_M rows of x with tensor cores."""
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
        _finish(
            sums, m[:, None], n[None, :], inside, x_scale, w_scale, bias, out, columns, x_scale_stride,
            HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def finish_kernel(
    partial, x_scale, w_scale, bias, out, rows, columns, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the splits in order and finishes the result."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * columns
    sums = tl.load(partial + place, mask=inside, other=0)
    for index in range(1, SHARES):
        sums += tl.load(partial + index * rows * columns + place, mask=inside, other=0)
    _finish(
        sums, place // columns, place % columns, inside, x_scale, w_scale, bias, out, columns, x_scale_stride,
        HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS,
    )  # fmt: skip
