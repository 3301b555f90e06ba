"""Products of a few rows with a large weight: what one program of each kernel does.

Such products take as long as reading the weight does, so each program reads the whole depth of a few of the weight's
rows, or a share of it where that would leave multiprocessors idle; the shares' sums are added up afterwards, in order.
Reads inside the depth have no mask, and rows past the last are read as the last: 16 bytes a thread where it divides.

`x` is (M, K), `w` (N, K), `out` (M, N), `partial` (shares, M, N). What is added up is multiplied by `x_scale` of the
row and `w_scale` of the output, where there are such, before the bias is added. An int8 weight beside a row of another
dtype becomes that dtype as it is read; beside int8 rows the sums are int32, and exact.
"""

import triton
import triton.language as tl


@triton.jit
def _finish(
    sums, m, n, inside, x_scale, w_scale, bias, out, columns, x_scale_stride,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scales, adds the bias and writes; `m` and `n` have the shape of `sums`, or spread to it."""
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
    """An int8 becomes the last bits of 2²³ + 128 + itself: that takes less time than the conversion of the hardware."""
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
    """One row of x: products are added up by each thread for itself, and between threads once, at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, depth)
    whole = first + (last - first) // BLOCK_K * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    rows = w + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * w_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(first, whole, BLOCK_K):
        # The weight is needed once, x by every program: it should stay in the caches.
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
    """Up to BLOCK_M rows of x on the tensor cores."""
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
    """Adds up the shares in order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * columns
    sums = tl.load(partial + place, mask=inside, other=0)
    for index in range(1, SHARES):
        sums += tl.load(partial + index * rows * columns + place, mask=inside, other=0)
    _finish(
        sums, place // columns, place % columns, inside, x_scale, w_scale, bias, out, columns, x_scale_stride,
        HAS_X_SCALE, HAS_W_SCALE, HAS_BIAS,
    )  # fmt: skip
