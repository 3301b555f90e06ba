"""The kernel of the fused linear layer.

Normalizing does not touch the rows before the product: with mean m and scale s of a row,
(x − m) · s @ W = s · (x @ W − m · (sum of W's row)), so that it is two numbers a row in the end, in fp32.
"""

import triton
import triton.language as tl

from redline.ops.fused_linear.reference import SLOPE

STEP = 8
_STEP = tl.constexpr(STEP)
_PARTS = tl.constexpr(8)
_SLOPE = tl.constexpr(SLOPE)
_HALF_ROOT = tl.constexpr(0.7071067811865476)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gelu(x):
    """x · Φ(x), Φ off by 3e-7 at most (Abramowitz and Stegun 7.1.26), in fewer steps than erf."""
    z = tl.abs(x) * _HALF_ROOT
    t = 1.0 / (1.0 + 0.3275911 * z)
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * sums * tl.exp2(-z * z * _LOG2_E)
    return x * tl.where(x > 0, 1.0 - tail, tail)


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
    K = K_steps * _STEP
    N = N_steps * _STEP
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < rows
    row_place = row.to(tl.int64)
    inside = there[:, None] & (column < N)[None, :]
    old_place = residual + row_place[:, None] * (residual_steps * _STEP) + column[None, :]
    if RESIDUAL and AHEAD:
        old = tl.load(old_place, mask=inside, other=0.0)  # comes while the product is made

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_row = x + row_place[:, None] * (x_steps * _STEP)
    weight_row = weight + column[None, :] * K
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        some = tl.load(x_row + channel[None, :], mask=there[:, None] & (channel < K)[None, :], other=0.0)
        weights = tl.load(weight_row + channel[:, None], mask=(channel < K)[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(some, weights, total, input_precision=PRECISION)

    if NORMALIZE:
        sums = tl.zeros((BLOCK_M,), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
        # Several parts at once: one after another, each would wait for the one before.
        for start in range(0, parts, _PARTS):
            part = start + tl.arange(0, _PARTS)[:, None]
            known = (part < parts) & there[None, :]
            place = moments + row_place[None, :] + 2 * part * rows
            sums += tl.sum(tl.load(place, mask=known, other=0.0), 0)
            squares += tl.sum(tl.load(place + rows, mask=known, other=0.0), 0)
        mean = sums / channels
        scale = tl.rsqrt(tl.maximum(squares / channels - mean * mean, 0.0) + eps)
        of_weights = tl.load(weight_sums + column, mask=column < N, other=0.0)
        total = (total - mean[:, None] * of_weights[None, :]) * scale[:, None]
    total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        total = _gelu(total)
    if ACTIVATION == "leaky_relu":
        total = tl.where(total > 0, total, _SLOPE * total)
    if RESIDUAL:
        if not AHEAD:
            old = tl.load(old_place, mask=inside, other=0.0)
        total = old.to(tl.float32) + share * total
    written = total.to(out.dtype.element_ty)
    tl.store(out + row_place[:, None] * (out_steps * _STEP) + column[None, :], written, mask=inside)
    if MOMENTS:
        # Of what was written: that is what will be normalized. Columns beyond the last are zero.
        seen = tl.where(inside, written.to(tl.float32), 0.0)
        place = new_moments + row_place + 2 * tile * rows
        tl.store(place, tl.sum(seen, 1), mask=there)
        tl.store(place + rows, tl.sum(seen * seen, 1), mask=there)
