"""Triton kernels of the fused linear layer.

Rows are normalized after the product, in fp32: with mean m and inverse standard deviation s of a row,
(x − m) · s @ Wᵀ = s · (x @ Wᵀ − m · (row sums of W)).

Each program computes one block of the result. `linear_kernel` runs on all GPUs; `descriptor_kernel` loads and stores
blocks with the tensor memory accelerator of Hopper and newer GPUs.

M: rows, K: input channels, N: output columns.
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
    """Computes x · Φ(x) with an approximation of Φ (Abramowitz and Stegun 7.1.26, error ≤ 3e-7), cheaper than erf."""
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
def mean_and_scale(moments, row_offset, row_mask, rows, parts, channels, eps):
    """Returns mean and inverse standard deviation of each row. Loads the moments of several column blocks per step."""
    sums = tl.zeros(row_offset.shape, tl.float32)
    squares = tl.zeros(row_offset.shape, tl.float32)
    for start in range(0, parts, _PARTS):
        part = start + tl.arange(0, _PARTS)[:, None]
        column_mask = (part < parts) & row_mask[None, :]
        offset = moments + row_offset[None, :] + 2 * part * rows
        sums += tl.sum(tl.load(offset, mask=column_mask, other=0.0), 0)
        squares += tl.sum(tl.load(offset + rows, mask=column_mask, other=0.0), 0)
    mean = sums / channels
    return mean, tl.rsqrt(tl.maximum(squares / channels - mean * mean, 0.0) + eps)


@triton.jit
def normalized(total, place, weight_sums, moments, rows, parts, channels, eps):
    column, column_mask, row_offset, row_mask = place
    mean, scale = mean_and_scale(moments, row_offset, row_mask, rows, parts, channels, eps)
    weight_sum = tl.load(weight_sums + column, mask=column_mask, other=0.0)
    return (total - mean[:, None] * weight_sum[None, :]) * scale[:, None]


@triton.jit
def apply_epilogue(
    total, place, bias, residual, out, residual_steps, out_steps, share,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Applies bias, activation and residual, writes the block, and returns the stored values with 0 out of bounds."""
    column, column_mask, row_offset, row_mask = place
    inside = row_mask[:, None] & column_mask[None, :]
    total = activated(total + tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :], ACTIVATION)
    if RESIDUAL:
        residual_offset = residual + row_offset[:, None] * (residual_steps * STEP_OF_ROWS) + column[None, :]
        total = tl.load(residual_offset, mask=inside, other=0.0).to(tl.float32) + share * total
    result = total.to(out.dtype.element_ty)
    tl.store(out + row_offset[:, None] * (out_steps * STEP_OF_ROWS) + column[None, :], result, mask=inside)
    return tl.where(inside, result.to(tl.float32), 0.0)


@triton.jit
def write_moments(stored, part, new_moments, row_offset, row_mask, rows):
    """Writes the moments of the rounded values, because the next layer normalizes these."""
    offset = new_moments + row_offset + 2 * part * rows
    tl.store(offset, tl.sum(stored, 1), mask=row_mask)
    tl.store(offset + rows, tl.sum(stored * stored, 1), mask=row_mask)


# Sizes are run-time arguments, so that few compiled kernels serve all layers. Arguments named `_steps` count units of 8
# elements, so that the compiler knows that it can load 8 at once.
@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"])
def linear_kernel(
    x, weight, bias, weight_sums, moments, residual, new_moments, out,
    rows, K_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one block. Consecutive programs compute blocks of the same rows, which they then share in the cache."""
    K = K_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < rows
    column_mask = column < N
    row_offset = row.to(tl.int64)
    place = (column, column_mask, row_offset, row_mask)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_row = x + row_offset[:, None] * (x_steps * STEP_OF_ROWS)
    weight_row = weight + column[None, :] * K
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        rows_block = tl.load(x_row + channel[None, :], mask=row_mask[:, None] & (channel < K)[None, :], other=0.0)
        weights = tl.load(weight_row + channel[:, None], mask=(channel < K)[:, None] & column_mask[None, :], other=0.0)
        total = tl.dot(rows_block, weights, total, input_precision=PRECISION)

    if NORMALIZE:
        total = normalized(total, place, weight_sums, moments, rows, parts, channels, eps)
    stored = apply_epilogue(total, place, bias, residual, out, residual_steps, out_steps, share, ACTIVATION, RESIDUAL)
    if MOMENTS:
        write_moments(stored, tile, new_moments, row_offset, row_mask, rows)


@triton.jit(do_not_specialize=["rows", "K_steps", "N_steps", "parts"])
def descriptor_kernel(
    bias, weight_sums, moments, new_moments, x, weight, residual, out,
    rows, K_steps, N_steps, parts, channels, eps, share,
    NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one block with descriptors, which load zeros beyond the bounds and store nothing there."""
    K = K_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % tiles
    first_row = program // tiles * BLOCK_M
    first_column = tile * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    row_mask = row < rows
    column_mask = column < N
    row_offset = row.to(tl.int64)
    place = (column, column_mask, row_offset, row_mask)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        total = tl.dot(x.load([first_row, start]), tl.trans(weight.load([first_column, start])), total)

    if NORMALIZE:
        total = normalized(total, place, weight_sums, moments, rows, parts, channels, eps)
    total = activated(total + tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :], ACTIVATION)
    if RESIDUAL:
        total = residual.load([first_row, first_column]).to(tl.float32) + share * total
    result = total.to(out.dtype)
    out.store([first_row, first_column], result)
    if MOMENTS:
        stored = tl.where(row_mask[:, None] & column_mask[None, :], result.to(tl.float32), 0.0)
        write_moments(stored, tile, new_moments, row_offset, row_mask, rows)
