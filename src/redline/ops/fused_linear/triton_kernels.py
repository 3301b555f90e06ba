"""The kernels of the fused linear layer.

Normalizing does not touch the rows before the product: with mean m and scale s of a row,
(x − m) · s @ W = s · (x @ W − m · (sum of W's row)), so that it is two numbers a row in the end, in fp32.

There are two, each of which makes one block of the result: `linear_kernel` on any card, and `described_kernel`, for
which the copying unit of Hopper and newer cards reads and writes blocks by descriptors.
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
def normalized(total, column, known, weight_sums, moments, row_place, there, rows, parts, channels, eps):
    mean, scale = mean_and_scale(moments, row_place, there, rows, parts, channels, eps)  # pyright: ignore[reportGeneralTypeIssues]
    of_weights = tl.load(weight_sums + column, mask=known, other=0.0)
    return (total - mean[:, None] * of_weights[None, :]) * scale[:, None]


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


@triton.jit
def write_moments(seen, part, new_moments, row_place, there, rows):
    """Of what was written: that is what will be normalized."""
    place = new_moments + row_place + 2 * part * rows
    tl.store(place, tl.sum(seen, 1), mask=there)
    tl.store(place + rows, tl.sum(seen * seen, 1), mask=there)


# Sizes are known at run time, so that few kernels serve all layers. They come in steps of 8 numbers: that tells the
# compiler that it may read 8 at once.
@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"])
def linear_kernel(
    x, weight, bias, weight_sums, moments, residual, new_moments, out,
    rows, K_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
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
    known = column < N
    row_place = row.to(tl.int64)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_row = x + row_place[:, None] * (x_steps * STEP_OF_ROWS)
    weight_row = weight + column[None, :] * K
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        some = tl.load(x_row + channel[None, :], mask=there[:, None] & (channel < K)[None, :], other=0.0)
        weights = tl.load(weight_row + channel[:, None], mask=(channel < K)[:, None] & known[None, :], other=0.0)
        total = tl.dot(some, weights, total, input_precision=PRECISION)

    if NORMALIZE:
        total = normalized(
            total, column, known, weight_sums, moments, row_place, there, rows, parts, channels, eps
        )  # fmt: skip
    seen = finish(
        total, column, known, bias, residual, out, row_place, there, residual_steps, out_steps, share, ACTIVATION,
        RESIDUAL,
    )  # fmt: skip
    if MOMENTS:
        write_moments(seen, tile, new_moments, row_place, there, rows)


@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts"])
def described_kernel(
    bias, weight_sums, moments, new_moments, x, weight, residual, out,
    rows, K_steps, N_steps, parts, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same, with descriptors of x, weight, residual and out: they give zeros beyond the ends, and write nothing."""
    K = K_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % tiles
    first_row = program // tiles * BLOCK_M
    first_column = tile * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    there = row < rows
    known = column < N
    row_place = row.to(tl.int64)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        total = tl.dot(x.load([first_row, start]), tl.trans(weight.load([first_column, start])), total)

    if NORMALIZE:
        total = normalized(
            total, column, known, weight_sums, moments, row_place, there, rows, parts, channels, eps
        )  # fmt: skip
    total = activated(total + tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :], ACTIVATION)
    if RESIDUAL:
        total = residual.load([first_row, first_column]).to(tl.float32) + share * total
    written = total.to(out.dtype)
    out.store([first_row, first_column], written)
    if MOMENTS:
        seen = tl.where(there[:, None] & known[None, :], written.to(tl.float32), 0.0)
        write_moments(seen, tile, new_moments, row_place, there, rows)
