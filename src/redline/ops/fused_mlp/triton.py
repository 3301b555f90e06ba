"""The fused MLP with a Triton kernel, registered as a custom op for torch.compile.

The kernel is structured like fused attention, with an activation instead of the softmax. A program keeps its rows in
shared memory and loops over blocks of hidden channels, which it computes, activates and multiplies by the outer weight
without writing them. Blocks are powers of two, so 184 channels would be padded to 256. The K channels are therefore
split into pieces of FIRST and REST channels (128 and 64 for 184), and the N columns of the result into OUT and
OUT_REST. If rows or results are too wide for one program, or the dtype is fp32, the op runs two fused linear layers.

M: rows, K: input channels, H: hidden channels, N: output columns.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.fused_linear import triton as linear
from redline.ops.fused_linear.reference import MOMENT_COLUMNS
from redline.ops.fused_linear.triton_kernels import (
    STEP,
    STEP_OF_ROWS,
    apply_epilogue,
    gelu,
    mean_and_scale,
    write_moments,
)


@dataclass(frozen=True)
class MlpTiles:
    """Rows per program, hidden channels per step, warps, and pipeline stages of the single-kernel implementation."""

    rows: int
    hidden: int
    warps: int
    stages: int


# The key is "many columns" for more than 32 output columns; otherwise it depends on the padded number of input channels
# (see `tiles_for`). All entries but "widest" were the fastest of eight settings on an H200 (docs/log.md).
MLP_TILES = {
    "narrow": MlpTiles(128, 64, 8, 2),
    "wide": MlpTiles(256, 32, 8, 3),
    "widest": MlpTiles(128, 32, 8, 2),
    "many columns": MlpTiles(128, 32, 8, 2),
}
_NARROW, _WIDE = 192, 288
_FEW, _MANY = 32, 192
# The single kernel is used for at most `_MOST_CHANNELS` input channels (padded), so that enough shared memory is left
# for the weights, and only on GPUs with at least `_SHARED_BYTES` of shared memory per program.
_MOST_CHANNELS = 320
_SHARED_BYTES = 200 * 2**10


def why_not(x_MK: Tensor, inner_HK: Tensor, outer_NJ: Tensor) -> str:
    return linear.why_not(x_MK, inner_HK) or linear.why_not(x_MK, outer_NJ)


@triton.jit
def _load_rows(base, steps, row_offset, row_mask, begin, K, PIECE: tl.constexpr):
    """Loads PIECE channels of each row, starting at `begin`, with 0 out of bounds. `steps` is the row stride / STEP."""
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
    mean, scale = mean_and_scale(moments, row_offset, row_mask, rows, parts, channels, eps)
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
    place = (column, column_mask, row_offset, row_mask)
    stored = apply_epilogue(
        total, place, outer_bias, residual, out, residual_steps, out_steps, share, ACTIVATION, RESIDUAL
    )
    if MOMENTS:
        write_moments(stored, 0, new_moments, row_offset, row_mask, rows)
    if OUT_REST > 0:
        place = (more, more_mask, row_offset, row_mask)
        stored_rest = apply_epilogue(
            total_rest, place, outer_bias, residual, out, residual_steps, out_steps, share, ACTIVATION, RESIDUAL
        )
        if MOMENTS:
            write_moments(stored_rest, 1, new_moments, row_offset, row_mask, rows)


@kernel.custom_op("fused_mlp", lambda *_: None, mutates=("out", "new_moments"))
def fused_mlp(
    x: Tensor,
    inner: Tensor,
    inner_bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    out: Tensor,
    moments: Tensor,
    inner_sums: Tensor,
    channels: int,
    eps: float,
    activation: str,
    residual: Tensor | None,
    share: float,
    new_moments: Tensor | None,
) -> None:
    """Computes the same as the reference in fp32, except that the hidden activations are rounded to the dtype of x."""
    rows, (hidden, wide), columns = x.shape[0], inner.shape, outer.shape[0]
    if columns > _MANY or not is_fusable(x):
        both = x.new_empty(rows, wide + hidden)
        both[:, :wide] = x
        linear.fused_linear(
            x, inner, inner_bias, both[:, wide:], moments, inner_sums, channels, eps, "gelu", None, 1.0, None
        )
        linear.fused_linear(both, outer, outer_bias, out, None, None, 0, eps, activation, residual, share, new_moments)
        return
    old, new = (x if tensor is None else tensor for tensor in (residual, new_moments))
    whole = (inner, inner_bias, inner_sums, outer, outer_bias, moments)
    linear.check_layout((x, out, old), whole if new_moments is None else (*whole, new_moments))
    blocks = -(-rows // tiles_for(wide, columns).rows)
    kernel.launch(
        mlp_kernel, (blocks,), x, inner, inner_bias, inner_sums, moments, outer, outer_bias, old, new, out,
        rows, wide // STEP, hidden // STEP, columns // STEP, moments.shape[0],
        x.stride(0) // STEP, old.stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        **constants(wide, columns, activation, residual is not None, new_moments is not None),
    )  # fmt: skip


def is_fusable(x: Tensor) -> bool:
    small = x.element_size() == 2 and sum(kernel.pieces(x.shape[1])) <= _MOST_CHANNELS
    return small and kernel.shared_bytes(x) >= _SHARED_BYTES


def tiles_for(channels: int, columns: int) -> MlpTiles:
    if columns > _FEW:
        return MLP_TILES["many columns"]
    width = sum(kernel.pieces(channels))
    return MLP_TILES["narrow" if width <= _NARROW else "wide" if width <= _WIDE else "widest"]


def constants(channels: int, columns: int, activation: str, residual: bool, moments: bool) -> dict[str, object]:
    """Returns the compile-time constants of the kernel."""
    chosen = tiles_for(channels, columns)
    first, rest = kernel.pieces(channels)
    return {
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "MOMENTS": moments,
        "BLOCK_M": chosen.rows,
        "BLOCK_H": chosen.hidden,
        "FIRST": first,
        "REST": rest,
        # Each piece of the output columns is one block with its own moments.
        "OUT": min(MOMENT_COLUMNS, kernel.padded(columns)),
        "OUT_REST": kernel.padded(columns - MOMENT_COLUMNS) if columns > MOMENT_COLUMNS else 0,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
