"""The kernel of the fused MLP: attention's own pattern, with an activation in the place of the softmax.

A program keeps its rows while the hidden channels pass by, a block at a time, each made, activated and multiplied on
without leaving the processor. Blocks are powers of two, so that 184 channels would be read as 256: rows are taken in
two pieces, FIRST and REST, of 128 and 64, and so are the columns of the result, OUT and OUT_REST.
"""

import triton
import triton.language as tl

from redline.ops.fused_linear.triton_kernels import (
    STEP_OF_ROWS,
    finish,
    gelu,
    mean_and_scale,
    write_moments,
)


@triton.jit
def _read_rows(base, steps, row_place, there, begin, K, PIECE: tl.constexpr):
    """So many channels of rows that lie `steps` apart, from `begin` on; zeros beyond K and beyond the last row."""
    channel = begin + tl.arange(0, PIECE)
    place = base + row_place[:, None] * (steps * STEP_OF_ROWS) + channel[None, :]
    return tl.load(place, mask=there[:, None] & (channel < K)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=["rows", "K_steps", "H_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"]
)
def mlp_kernel(
    x, inner, inner_bias, inner_sums, moments, outer, outer_bias, residual, new_moments, out,
    rows, K_steps, H_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, OUT: tl.constexpr, OUT_REST: tl.constexpr,
):  # fmt: skip
    """A block of rows, all hidden channels and all columns of it."""
    K = K_steps * STEP_OF_ROWS
    H = H_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    J_steps = K_steps + H_steps
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < rows
    row_place = row.to(tl.int64)
    mean, scale = mean_and_scale(moments, row_place, there, rows, parts, channels, eps)  # pyright: ignore[reportGeneralTypeIssues]
    first = _read_rows(x, x_steps, row_place, there, 0, K, FIRST)
    column = tl.arange(0, OUT)
    known = column < N
    # The rows' own share of the result, before the hidden channels'.
    total = tl.dot(first, tl.trans(_read_rows(outer, J_steps, column, known, 0, K, FIRST)))
    if REST > 0:
        rest = _read_rows(x, x_steps, row_place, there, FIRST, K, REST)
        total = tl.dot(rest, tl.trans(_read_rows(outer, J_steps, column, known, FIRST, K, REST)), total)
    if OUT_REST > 0:
        more = OUT + tl.arange(0, OUT_REST)
        more_known = more < N
        total_rest = tl.dot(first, tl.trans(_read_rows(outer, J_steps, more, more_known, 0, K, FIRST)))
        if REST > 0:
            of_rest = _read_rows(outer, J_steps, more, more_known, FIRST, K, REST)
            total_rest = tl.dot(rest, tl.trans(of_rest), total_rest)
    for start in range(0, H, BLOCK_H):
        channel = start + tl.arange(0, BLOCK_H)
        there_too = channel < H
        hidden = tl.dot(first, tl.trans(_read_rows(inner, K_steps, channel, there_too, 0, K, FIRST)))
        if REST > 0:
            hidden = tl.dot(rest, tl.trans(_read_rows(inner, K_steps, channel, there_too, FIRST, K, REST)), hidden)
        of_weights = tl.load(inner_sums + channel, mask=there_too, other=0.0)
        hidden = (hidden - mean[:, None] * of_weights[None, :]) * scale[:, None]
        hidden += tl.load(inner_bias + channel, mask=there_too, other=0.0).to(tl.float32)[None, :]
        # Channels beyond the last are gelu(0) = 0.
        given = gelu(hidden).to(first.dtype)
        total = tl.dot(given, tl.trans(_read_rows(outer, J_steps, column, known, K + start, K + H, BLOCK_H)), total)
        if OUT_REST > 0:
            weights = _read_rows(outer, J_steps, more, more_known, K + start, K + H, BLOCK_H)
            total_rest = tl.dot(given, tl.trans(weights), total_rest)
    seen = finish(
        total, column, known, outer_bias, residual, out, row_place, there, residual_steps, out_steps, share, ACTIVATION,
        RESIDUAL,
    )  # fmt: skip
    if MOMENTS:
        write_moments(seen, 0, new_moments, row_place, there, rows)
    if OUT_REST > 0:
        seen_rest = finish(
            total_rest, more, more_known, outer_bias, residual, out, row_place, there, residual_steps, out_steps, share,
            ACTIVATION, RESIDUAL,
        )  # fmt: skip
        if MOMENTS:
            write_moments(seen_rest, 1, new_moments, row_place, there, rows)
