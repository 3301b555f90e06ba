"""Window attention with Triton kernels, forward and backward, registered as custom ops for torch.compile.

The scores are never written to memory: forward saves one value per query beside the output, and backward recomputes the
probabilities, once for queries, once for keys and values, and once for the bias. Sums over windows are in a fixed
order, so gradients are deterministic.

B: images, H and W: height and width in tokens, C: channels, N: tokens per window, R: rows of the bias table.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops import kernel
from redline.ops.window_attention.reference import expand_bias_table
from redline.ops.window_attention.triton_kernels import (
    bias_gradient_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

_WINDOWS = (4, 8, 16, 32)
_LARGEST_HEAD = 128
# Whether forward splits heads of 48 or 80 channels into 32 + 16 and 64 + 16 instead of padding them to 64 and 128.
IN_PIECES = True
# The bias is copied to shared memory in units of this size. Larger copies would bypass the L1 cache, which can hold the
# bias of a head.
_BIAS_READ_BYTES = 8
# At most this many programs sum the gradient of the bias: enough to occupy any GPU, with few partial sums left to add.
_BIAS_PROGRAMS = 1024


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per block, warps per program, and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# Keyed by element size in bytes and padded head dimension. The tiles fit the registers of sm_90 and the 99 KiB of
# shared memory of the smallest GPUs. The forward tiles for two bytes were the fastest of six for the heads of
# DRCT-L on an H200 (docs/log.md).
FORWARD_TILES = {
    **{(2, size): Tiles(64, 32, 4, 3) for size in (16, 32, 64, 128)},
    **{(4, size): Tiles(64, 32, 4, 1) for size in (16, 32, 64)},
    (4, 128): Tiles(32, 32, 4, 1),
}
BACKWARD_TILES = {
    **{(2, size): Tiles(64, 64, 4, 2) for size in (16, 32, 64)},
    (2, 128): Tiles(64, 32, 4, 1),
    **{(4, size): Tiles(64, 16, 4, 1) for size in (16, 32, 64)},
    (4, 128): Tiles(32, 16, 4, 1),
}


def window_attention(qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0) -> Tensor:
    """Computes the same as the reference. Scores, softmax and sums are fp32 for every dtype."""
    return _forward(qkv_BHW3C, table_RH, window, shift)[0]


def why_not(qkv_BHW3C: Tensor, heads: int, window: int) -> str:
    reason = kernel.why_not(qkv_BHW3C)
    if reason:
        return reason
    head_size = qkv_BHW3C.shape[-1] // 3 // heads
    if window not in _WINDOWS:
        return f"unsupported window {window} (supported: 4, 8, 16, 32)"
    if head_size > _LARGEST_HEAD:
        return f"heads may have at most {_LARGEST_HEAD} channels, not {head_size}"
    return ""


def _empty_output(qkv: Tensor, *_: object) -> Tensor:
    return torch.empty((*qkv.shape[:3], qkv.shape[3] // 3), dtype=qkv.dtype, device=qkv.device)


@kernel.custom_op("window_attention_expanded", _empty_output)
def window_attention_expanded(qkv: Tensor, bias: Tensor, shift: int) -> Tensor:
    """Computes window attention for inference and writes only the output."""
    qkv, out = qkv.contiguous(), _empty_output(qkv)
    _run_forward(qkv, bias.contiguous(), shift, out, None)
    return out


def _empty_outputs(qkv: Tensor, table: Tensor, window: int, shift: int) -> tuple[Tensor, Tensor]:
    tokens = qkv.shape[:3].numel()
    lse = torch.empty((tokens // window**2, table.shape[1], window**2), dtype=torch.float32, device=qkv.device)
    return _empty_output(qkv), lse


@kernel.custom_op("window_attention", _empty_outputs)
def _forward(qkv: Tensor, table: Tensor, window: int, shift: int) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    out, lse = _empty_outputs(qkv, table, window, shift)
    _run_forward(qkv, expand_bias_table(table, window), shift, out, lse)
    return out, lse


def _run_forward(qkv: Tensor, bias: Tensor, shift: int, out: Tensor, lse: Tensor | None) -> None:
    heads, window = bias.shape[0], bias.shape[-1]
    block, rest = _pieces(qkv.shape[-1] // 3 // heads)
    constants, tiles = _constants(qkv, bias, heads, window, shift, FORWARD_TILES, block)
    blocks = heads * qkv.shape[:3].numel() // tiles.queries
    kernel.launch(
        forward_kernel, (blocks,), qkv, bias, out, out if lse is None else lse, *qkv.shape[1:3],
        REST=rest, WRITES_LSE=lse is not None, **constants,
    )  # fmt: skip


@kernel.custom_op(
    "window_attention_backward", lambda qkv, table, out, lse, *_: (kernel.empty_like(qkv), torch.empty_like(lse))
)
def _backward(
    qkv: Tensor, table: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, window: int, shift: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of qkv, and each query's sum of out · gradient, which the table's gradient also needs."""
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    constants, tiles = _constants(qkv, table, table.shape[1], window, shift, BACKWARD_TILES)
    bias, size = expand_bias_table(table, window), qkv.shape[1:3]
    qkv_gradient, delta = torch.empty_like(qkv), torch.empty_like(lse)
    read, written = (lse, gradient), (delta, qkv_gradient)
    queries, keys = lse.numel() // tiles.queries, lse.numel() // tiles.keys
    kernel.launch(query_gradient_kernel, (queries,), qkv, bias, out, *read, *written, *size, **constants)
    kernel.launch(key_gradient_kernel, (keys,), qkv, bias, *read, *written, *size, **constants)
    return qkv_gradient, delta


@kernel.custom_op("window_attention_table_gradient", lambda qkv, table, *_: kernel.empty_like(table))
def _table_gradient(
    qkv: Tensor, table: Tensor, lse: Tensor, delta: Tensor, gradient: Tensor, window: int, shift: int
) -> Tensor:
    qkv, gradient = qkv.contiguous(), gradient.contiguous()
    constants, tiles = _constants(qkv, table, table.shape[1], window, shift, BACKWARD_TILES)
    windows, heads, tokens = lse.shape
    blocks = heads * (tokens // tiles.queries) * (tokens // tiles.keys)
    shares = max(1, min(windows, _BIAS_PROGRAMS // blocks))
    partial = torch.empty((shares, heads, tokens, tokens), dtype=torch.float32, device=qkv.device)
    arguments = (qkv, expand_bias_table(table, window), lse, gradient, delta, partial, *qkv.shape[1:3], windows, shares)
    kernel.launch(bias_gradient_kernel, (shares * blocks,), *arguments, **constants)
    return _gather(partial.sum(0), window).to(table.dtype)


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, ...]:
    qkv, table, out, lse = ctx.saved_tensors
    qkv_gradient, delta = _backward(qkv, table, out, lse, gradient, *ctx.options)
    if not ctx.needs_input_grad[1]:
        return (qkv_gradient,)
    return qkv_gradient, _table_gradient(qkv, table, lse, delta, gradient, *ctx.options)


kernel.differentiate(_forward, _differentiate, saved=lambda inputs, output: (*inputs[:2], *output), materialize=False)


def _pieces(size: int) -> tuple[int, int]:
    """Returns two powers of two that add up to the size of a head, or the padded size and 0."""
    padded = kernel.padded(size)
    rest = size - padded // 2
    return (padded // 2, rest) if IN_PIECES and size < padded and rest in (16, 32, 64) else (padded, 0)


def _constants(
    qkv: Tensor,
    bias: Tensor,
    heads: int,
    window: int,
    shift: int,
    choices: dict[tuple[int, int], Tiles],
    block: int = 0,
) -> tuple[dict[str, object], Tiles]:
    """Returns the compile-time constants and the tiles. `block`, if given, replaces the padded head size."""
    tokens = window * window
    size = qkv.shape[-1] // 3 // heads
    padded = block or kernel.padded(size)
    chosen = choices[qkv.element_size(), padded]
    tiles = Tiles(min(chosen.queries, tokens), min(chosen.keys, tokens), chosen.warps, chosen.stages)
    constants: dict[str, object] = {
        "scale": size**-0.5,
        "HEADS": heads,
        "SIZE": size,
        "PADDED": padded,
        "ALIGN": _alignment(heads, size, padded),
        "WINDOW": window,
        "SHIFT": shift,
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "RUN": _BIAS_READ_BYTES // bias.element_size(),
        "PRECISION": kernel.dot_precision(qkv.dtype),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    return constants, tiles


def _alignment(heads: int, size: int, padded: int) -> int:
    """Returns the largest alignment for which each head, loaded from an aligned channel, fits the padded size."""
    for step in (8, 4, 2):
        if heads * size % step == 0 and size + max(head * size % step for head in range(heads)) <= padded:
            return step
    return 1


def _gather(pairs_HNN: Tensor, window: int) -> Tensor:
    """Sums the gradients of all pairs of tokens that use the same row of the table, (R, heads)."""
    pairs = pairs_HNN.unflatten(2, (window, window)).unflatten(1, (window, window))
    by_row = _sum_diagonals(pairs.permute(0, 2, 4, 1, 3))
    return _sum_diagonals(by_row.permute(0, 3, 1, 2)).flatten(1).t().contiguous()


def _sum_diagonals(square: Tensor) -> Tensor:
    """Sums the elements (i, j) of the last two dimensions with equal i + j: shifts row i right by i, sums columns."""
    side = square.shape[-1]
    moved = F.pad(square, (0, side)).flatten(-2)[..., :-side].unflatten(-1, (side, 2 * side - 1))
    return moved.sum(-2)
