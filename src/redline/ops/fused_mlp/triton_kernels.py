"""The Triton kernel of the fused MLP: structured like fused attention, with an activation instead of the softmax.

A program keeps its rows in shared memory and loops over blocks of hidden channels, which it computes, activates and
multiplies by the outer weight without writing them. Blocks are powers of two, so 184 channels would be padded to 256.
Rows are therefore split into pieces of FIRST and REST channels (128 and 64), and the result into OUT and OUT_REST.

M: rows, K: input channels, H: hidden channels, N: output columns.
"""

import triton
import triton.language as tl

from redline.ops.fused_linear.triton_kernels import (
    STEP_OF_ROWS,
    apply_epilogue,
    gelu,
    mean_and_scale,
    write_moments,
)


@triton.jit
def _load_rows(base, steps, row_offset, row_mask, begin, K, PIECE: tl.constexpr):
    """Loads PIECE channels from `begin` of rows that are `steps` apart, with zeros beyond K and the last row."""
    channel = begin + tl.arange(0, PIECE)
    offset = base + row_offset[:, None] * (steps * STEP_OF_ROWS) + channel[None, :]
    return tl.load(offset, mask=row_mask[:, None] & (channel < K)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=["rows", "K_steps", "H_steps", "N_steps", "parts", "x_steps", "residual_steps", "out_steps"]
)
def mlp_kernel(
    x, inner, inner_bias, inner_sums, moments, outer, outer_bias, residual, new_moments, out,
    rows, K_steps, H_steps, N_steps, parts, x_steps, residual_steps, out_steps, channels, eps, share,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, OUT: tl.constexpr, OUT_REST: tl.constexpr,
):  # fmt: skip
    """Computes all columns of one block of rows, over all hidden channels."""
    K = K_steps * STEP_OF_ROWS
    H = H_steps * STEP_OF_ROWS
    N = N_steps * STEP_OF_ROWS
    J_steps = K_steps + H_steps
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < rows
    row_offset = row.to(tl.int64)
    mean, scale = mean_and_scale(moments, row_offset, row_mask, rows, parts, channels, eps)  # pyright: ignore[reportGeneralTypeIssues]
    first = _load_rows(x, x_steps, row_offset, row_mask, 0, K, FIRST)
    column = tl.arange(0, OUT)
    column_mask = column < N
    # The contribution of the input channels comes first, then that of the hidden channels.
    total = tl.dot(first, tl.trans(_load_rows(outer, J_steps, column, column_mask, 0, K, FIRST)))
    if REST > 0:
        rest = _load_rows(x, x_steps, row_offset, row_mask, FIRST, K, REST)
        total = tl.dot(rest, tl.trans(_load_rows(outer, J_steps, column, column_mask, FIRST, K, REST)), total)
    if OUT_REST > 0:
        more = OUT + tl.arange(0, OUT_REST)
        more_mask = more < N
        total_rest = tl.dot(first, tl.trans(_load_rows(outer, J_steps, more, more_mask, 0, K, FIRST)))
        if REST > 0:
            outer_rest = _load_rows(outer, J_steps, more, more_mask, FIRST, K, REST)
            total_rest = tl.dot(rest, tl.trans(outer_rest), total_rest)
    for start in range(0, H, BLOCK_H):
        channel = start + tl.arange(0, BLOCK_H)
        channel_mask = channel < H
        hidden = tl.dot(first, tl.trans(_load_rows(inner, K_steps, channel, channel_mask, 0, K, FIRST)))
        if REST > 0:
            hidden = tl.dot(rest, tl.trans(_load_rows(inner, K_steps, channel, channel_mask, FIRST, K, REST)), hidden)
        weight_sum = tl.load(inner_sums + channel, mask=channel_mask, other=0.0)
        hidden = (hidden - mean[:, None] * weight_sum[None, :]) * scale[:, None]
        hidden += tl.load(inner_bias + channel, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        # In padding channels `hidden` is 0, and gelu(0) = 0.
        activated = gelu(hidden).to(first.dtype)
        total = tl.dot(
            activated, tl.trans(_load_rows(outer, J_steps, column, column_mask, K + start, K + H, BLOCK_H)), total
        )
        if OUT_REST > 0:
            weights = _load_rows(outer, J_steps, more, more_mask, K + start, K + H, BLOCK_H)
            total_rest = tl.dot(activated, tl.trans(weights), total_rest)
    stored = apply_epilogue(
        total, column, column_mask, outer_bias, residual, out, row_offset, row_mask, residual_steps, out_steps, share,
        ACTIVATION, RESIDUAL,
    )  # fmt: skip
    if MOMENTS:
        write_moments(stored, 0, new_moments, row_offset, row_mask, rows)
    if OUT_REST > 0:
        stored_rest = apply_epilogue(
            total_rest, more, more_mask, outer_bias, residual, out, row_offset, row_mask, residual_steps, out_steps,
            share, ACTIVATION, RESIDUAL,
        )  # fmt: skip
        if MOMENTS:
            write_moments(stored_rest, 1, new_moments, row_offset, row_mask, rows)
