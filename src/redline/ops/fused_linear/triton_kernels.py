"""The kernels of the fused linear layer.

Normalizing does not touch the rows before the product: with mean m and scale s of a row,
(x − m) · s @ W = s · (x @ W − m · (sum of W's row)), so that it is two numbers a row in the end, in fp32.

There are two. `linear_kernel` makes one block of the result, whatever the sizes. `rows_kernel` is for rows of few
channels, which it reads once and keeps while all columns pass by. Blocks are powers of two, so that 184 channels would
be read as 256: they are taken in two pieces, FIRST and REST, of 128 and 64.
"""

import triton
import triton.language as tl

from redline.ops.fused_linear.reference import SLOPE

STEP = 8
STEP_OF_ROWS = tl.constexpr(STEP)
_PARTS = tl.constexpr(8)
_SLOPE = tl.constexpr(SLOPE)
_HALF_ROOT = tl.constexpr(0.7071067811865476)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gelu(x):
    """x · Φ(x), Φ off by 3e-7 at most (Abramowitz and Stegun 7.1.26), in fewer steps than erf."""
    z = tl.abs(x) * _HALF_ROOT
    t = 1.0 / (1.0 + 0.3275911 * z)
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * sums * tl.exp2(-z * z * _LOG2_E)
    return x * tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def activated(total, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        total = gelu(total)
    if ACTIVATION == "leaky_relu":
        total = tl.where(total > 0, total, _SLOPE * total)
    return total


@triton.jit
def mean_and_scale(moments, row_place, there, rows, parts, channels, eps):
    """Of each row, from the parts of its moments: several at once, or each would wait for the one before."""
    sums = tl.zeros(row_place.shape, tl.float32)
    squares = tl.zeros(row_place.shape, tl.float32)
    for start in range(0, parts, _PARTS):
        part = start + tl.arange(0, _PARTS)[:, None]
        known = (part < parts) & there[None, :]
        place = moments + row_place[None, :] + 2 * part * rows
        sums += tl.sum(tl.load(place, mask=known, other=0.0), 0)
        squares += tl.sum(tl.load(place + rows, mask=known, other=0.0), 0)
    mean = sums / channels
    return mean, tl.rsqrt(tl.maximum(squares / channels - mean * mean, 0.0) + eps)


@triton.jit
def read_rows(base, steps, row_place, there, begin, K, PIECE: tl.constexpr):
    """So many channels of rows that lie `steps` apart, from `begin` on; zeros beyond K and beyond the last row."""
    channel = begin + tl.arange(0, PIECE)
    place = base + row_place[:, None] * (steps * STEP_OF_ROWS) + channel[None, :]
    return tl.load(place, mask=there[:, None] & (channel < K)[None, :], other=0.0)


@triton.jit
def finish(
    total, column, known, bias, residual, out, row_place, there, residual_steps, out_steps, share,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Writes what comes of a product in these columns, and gives what was written: zeros where nothing was."""
    inside = there[:, None] & known[None, :]
    total = activated(total + tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :], ACTIVATION)
    if RESIDUAL:
        old_place = residual + row_place[:, None] * (residual_steps * STEP_OF_ROWS) + column[None, :]
        total = tl.load(old_place, mask=inside, other=0.0).to(tl.float32) + share * total
    written = total.to(out.dtype.element_ty)
    tl.store(out + row_place[:, None] * (out_steps * STEP_OF_ROWS) + column[None, :], written, mask=inside)
    return tl.where(inside, written.to(tl.float32), 0.0)


# Sizes are known at run time, so that few kernels serve all layers. They come in steps of 8 numbers: that tells the
# compiler that it may read 8 at once.
@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"])
def linear_kernel(
    x, weight, bias, weight_sums, moments, residual, new_moments, out,
    rows, K_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows and columns; blocks of the same rows run side by side, to find them in the cache."""
    K = K_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < rows
    row_place = row.to(tl.int64)
    inside = there[:, None] & (column < N)[None, :]
    old_place = residual + row_place[:, None] * (residual_steps * STEP_OF_ROWS) + column[None, :]
    if RESIDUAL and AHEAD:
        old = tl.load(old_place, mask=inside, other=0.0)  # comes while the product is made

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_row = x + row_place[:, None] * (x_steps * STEP_OF_ROWS)
    weight_row = weight + column[None, :] * K
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        some = tl.load(x_row + channel[None, :], mask=there[:, None] & (channel < K)[None, :], other=0.0)
        weights = tl.load(weight_row + channel[:, None], mask=(channel < K)[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(some, weights, total, input_precision=PRECISION)

    if NORMALIZE:
        mean, scale = mean_and_scale(moments, row_place, there, rows, parts, channels, eps)
        of_weights = tl.load(weight_sums + column, mask=column < N, other=0.0)
        total = (total - mean[:, None] * of_weights[None, :]) * scale[:, None]
    total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    if RESIDUAL:
        if not AHEAD:
            old = tl.load(old_place, mask=inside, other=0.0)
        total = old.to(tl.float32) + share * total
    written = total.to(out.dtype.element_ty)
    tl.store(out + row_place[:, None] * (out_steps * STEP_OF_ROWS) + column[None, :], written, mask=inside)
    if MOMENTS:
        # Of what was written: that is what will be normalized. Columns beyond the last are zero.
        seen = tl.where(inside, written.to(tl.float32), 0.0)
        place = new_moments + row_place + 2 * tile * rows
        tl.store(place, tl.sum(seen, 1), mask=there)
        tl.store(place + rows, tl.sum(seen * seen, 1), mask=there)


@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"])
def rows_kernel(
    x, weight, bias, weight_sums, moments, residual, new_moments, out,
    rows, K_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    MOMENT_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """A block of rows, all columns of it."""
    K = K_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < rows
    row_place = row.to(tl.int64)
    first = read_rows(x, x_steps, row_place, there, 0, K, FIRST)
    if REST > 0:
        rest = read_rows(x, x_steps, row_place, there, FIRST, K, REST)
    if NORMALIZE:
        mean, scale = mean_and_scale(moments, row_place, there, rows, parts, channels, eps)
    if MOMENTS:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        known = column < N
        total = tl.dot(first, tl.trans(read_rows(weight, K_steps, column, known, 0, K, FIRST)))
        if REST > 0:
            total = tl.dot(rest, tl.trans(read_rows(weight, K_steps, column, known, FIRST, K, REST)), total)
        if NORMALIZE:
            of_weights = tl.load(weight_sums + column, mask=known, other=0.0)
            total = (total - mean[:, None] * of_weights[None, :]) * scale[:, None]
        seen = finish(
            total, column, known, bias, residual, out, row_place, there, residual_steps, out_steps, share, ACTIVATION,
            RESIDUAL,
        )  # fmt: skip
        if MOMENTS:
            # A part that takes several blocks is written with each, the last time whole.
            begins = start % MOMENT_COLUMNS == 0
            sums = tl.where(begins, 0.0, sums) + tl.sum(seen, 1)
            squares = tl.where(begins, 0.0, squares) + tl.sum(seen * seen, 1)
            place = new_moments + row_place + 2 * (start // MOMENT_COLUMNS) * rows
            tl.store(place, sums, mask=there)
            tl.store(place + rows, squares, mask=there)
