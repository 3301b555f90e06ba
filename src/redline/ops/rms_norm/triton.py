"""RMSNorm with Triton kernels, forward and backward, registered as custom ops for torch.compile.

Each row is read once and stays in registers until the result is written. A forward program computes ROWS rows. Backward
saves only the input and recomputes the statistics, which is faster than loading them. It launches few programs that
loop over many rows each. Each program writes one row of partial sums of the weight's gradient, and the rows are added
in a fixed order, so gradients are deterministic. `grad_x` is the gradient of `x`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel


@dataclass(frozen=True)
class Tiles:
    """Rows and warps per program; for backward also programs per multiprocessor and pipeline stages."""

    rows: int
    warps: int
    programs: int = 0
    stages: int = 1


@dataclass(frozen=True)
class SumTiles:
    """Rows and columns of partial sums that a program adds per step, and its warps."""

    rows: int
    columns: int
    warps: int


# The tiles, keyed by the largest padded row width. A thread holds 32 elements in the forward kernel (16 of each summand
# if a residual is added) and 16 in the backward kernel, which has more live values per element.
FORWARD_TILES = {
    64: Tiles(64, 4),
    128: Tiles(32, 4),
    256: Tiles(16, 4),
    512: Tiles(8, 4),
    1024: Tiles(4, 4),
    2048: Tiles(2, 4),
    4096: Tiles(1, 4),
    8192: Tiles(1, 8),
    16384: Tiles(1, 16),
    65536: Tiles(1, 32),
}
BACKWARD_TILES = {
    64: Tiles(32, 4, 4, 3),
    128: Tiles(16, 4, 4, 3),
    256: Tiles(8, 4, 4, 3),
    512: Tiles(4, 4, 4, 3),
    1024: Tiles(2, 4, 4, 3),
    2048: Tiles(1, 4, 4, 3),
    4096: Tiles(1, 8, 2, 3),
    8192: Tiles(1, 16, 1, 3),
    16384: Tiles(1, 32, 1, 2),
    65536: Tiles(1, 32, 1, 1),
}
# Enough rows to add nearly all partial sums in one step, because the kernel is bound by latency.
SUM_TILES = SumTiles(512, 16, 8)
_WIDEST = max(FORWARD_TILES)


def why_not(x: Tensor) -> str:
    if x.shape[-1] > _WIDEST:
        return f"rows may have at most {_WIDEST} elements, not {x.shape[-1]}"
    return kernel.why_not(x)


@triton.jit
def _inverse_rms(value, eps, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x, residual, weight, total, out, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + column
    inside = (row < rows)[:, None] & (column < WIDTH)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = value + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        stored = added.to(total.dtype.element_ty)
        tl.store(total + place, stored, mask=inside)
        value = stored.to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = value * _inverse_rms(value, eps, WIDTH)
    tl.store(out + place, (normed * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    x, weight, grad_out, grad_total, grad_x, partial, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes `grad_x`, and one row of `partial` per program.

    With ADD, x is the sum that forward returned, and `grad_total` is the gradient of this returned sum.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * WIDTH + column
        inside = (row < rows)[:, None] & (column < WIDTH)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        scaled = grad * scale
        along = tl.sum(scaled * value, axis=1)[:, None] / WIDTH
        inverse = _inverse_rms(value, eps, WIDTH)
        normed = value * inverse
        result = (scaled - normed * (along * inverse)) * inverse
        if ADD:
            result += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
        grad_weight += grad * normed
    place = partial + program * WIDTH + tl.arange(0, BLOCK)
    tl.store(place, tl.sum(grad_weight, axis=0), mask=tl.arange(0, BLOCK) < WIDTH)


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    partial, grad_weight, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Adds the rows of `partial` in a fixed order and rounds once."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        inside = (first + row < programs) & (column < WIDTH)[None, :]
        total += tl.load(partial + (first + row) * WIDTH + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, axis=0).to(grad_weight.dtype.element_ty)
    tl.store(grad_weight + column, result, mask=column < WIDTH)


@kernel.custom_op("rms_norm", lambda x, *_: kernel.empty_like(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = kernel.empty_like(x)
    _launch_forward(x.contiguous(), None, weight, None, out, eps)
    return out


@kernel.custom_op("add_rms_norm", lambda x, *_: (kernel.empty_like(x), kernel.empty_like(x)))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = kernel.empty_like(x), kernel.empty_like(x)
    _launch_forward(x.contiguous(), residual.contiguous(), weight, total, out, eps)
    return out, total


@kernel.custom_op("rms_norm_backward", lambda x, weight, *_: (kernel.empty_like(x), kernel.empty_like(weight)))
def _backward(x: Tensor, weight: Tensor, grad: Tensor, grad_total: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight. `grad_total` is the gradient of the sum that `add_rms_norm` returns."""
    width, grad_x = x.shape[-1], kernel.empty_like(x)
    block, rows = kernel.padded(width), x.numel() // width
    tiles = kernel.tiles_up_to(BACKWARD_TILES, block)
    programs = min(-(-rows // tiles.rows), tiles.programs * kernel.processors(x))
    grad_weight = kernel.empty_like(weight)
    # A single program writes the final sums directly.
    partial = grad_weight if programs == 1 else torch.empty((programs, width), dtype=torch.float32, device=x.device)
    read = (x.contiguous(), weight.contiguous(), grad.contiguous(), kernel.contiguous(grad_total))
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": tiles.rows, "ADD": grad_total is not None}
    constants |= {"STAGES": tiles.stages, "num_warps": tiles.warps}
    kernel.launch(backward_kernel, (programs,), *read, grad_x, partial, rows, eps, **constants)
    if programs != 1:
        _launch_sum(partial, grad_weight)
    return grad_x, grad_weight


def _differentiate_add(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return grad_total, grad_total
    grad_x, grad_weight = _backward(*ctx.saved_tensors, grad, grad_total, *ctx.options)
    return grad_x, grad_x, grad_weight


kernel.differentiate(rms_norm, lambda ctx, grad: _backward(*ctx.saved_tensors, grad, None, *ctx.options))
kernel.differentiate(
    add_rms_norm, _differentiate_add, saved=lambda inputs, output: (output[1], inputs[2]), materialize=False
)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    block, rows = kernel.padded(width), x.numel() // width
    tiles = kernel.tiles_up_to(FORWARD_TILES, block)
    # With a residual, a thread holds two values per element, so a program computes half as many rows.
    share = tiles.rows if residual is None else max(1, tiles.rows // 2)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": share, "ADD": residual is not None}
    arguments = (x, residual, weight.contiguous(), total, out, rows, eps)
    kernel.launch(forward_kernel, (-(-rows // share),), *arguments, **constants, num_warps=tiles.warps)


def _launch_sum(partial: Tensor, grad_weight: Tensor) -> None:
    programs, width = partial.shape
    rows = min(SUM_TILES.rows, kernel.padded(programs))
    constants = {"WIDTH": width, "ROWS": rows, "COLUMNS": SUM_TILES.columns, "num_warps": SUM_TILES.warps}
    kernel.launch(sum_kernel, (-(-width // SUM_TILES.columns),), partial, grad_weight, programs, **constants)
