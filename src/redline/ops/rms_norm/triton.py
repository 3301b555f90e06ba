"""RMSNorm with Triton kernels, forward and backward, registered as custom ops for torch.compile.

The backward pass saves only the input. Each program writes one row of partial sums of the weight's gradient, and the
rows are added in a fixed order, so gradients are deterministic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.rms_norm.triton_kernels import backward_kernel, forward_kernel, sum_kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Rows and warps per program; for backward also programs per multiprocessor and pipeline stages."""

    rows: int
    warps: int
    programs: int = 0
    stages: int = 1


@dataclass(frozen=True)
class SumTiles:
    """Rows of partial sums and columns that a program adds per step, and its warps."""

    rows: int
    columns: int
    warps: int


# Keyed by the largest padded row width. A thread holds 32 elements in the forward kernel (16 of each summand if a
# residual is added) and 16 in the backward kernel, which has more live values per element.
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
# One step covers nearly all rows of partial sums, because the sum is bound by latency.
SUM_TILES = SumTiles(512, 16, 8)
_WIDEST = max(FORWARD_TILES)


def why_not(x: Tensor) -> str:
    """Returns why the kernels do not support this input, or an empty string."""
    if x.shape[-1] > _WIDEST:
        return f"rows may have at most {_WIDEST} elements, not {x.shape[-1]}"
    return kernel.why_not(x)


@torch.library.custom_op("redline::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the reference function."""
    out = kernel.empty_like(x)
    _launch_forward(x.contiguous(), None, weight, None, out, eps)
    return out


@rms_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return kernel.empty_like(x)


@torch.library.custom_op("redline::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes the reference function."""
    out, total = kernel.empty_like(x), kernel.empty_like(x)
    _launch_forward(x.contiguous(), residual.contiguous(), weight, total, out, eps)
    return out, total


@add_rms_norm.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return kernel.empty_like(x), kernel.empty_like(x)


@torch.library.custom_op("redline::rms_norm_backward", mutates_args=())
def _backward(x: Tensor, weight: Tensor, grad: Tensor, grad_total: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight. `grad_total` is the gradient of the sum that `add_rms_norm` returns."""
    width, grad_x = x.shape[-1], kernel.empty_like(x)
    block, rows = kernel.padded(width), x.numel() // width
    tiles = kernel.tiles_up_to(BACKWARD_TILES, block)
    programs = min(-(-rows // tiles.rows), tiles.programs * kernel.processors(x))
    grad_weight = kernel.empty_like(weight)
    # A single program writes the final sums, not partial ones.
    partial = grad_weight if programs == 1 else torch.empty((programs, width), dtype=torch.float32, device=x.device)
    read = (x.contiguous(), weight.contiguous(), grad.contiguous(), kernel.contiguous(grad_total))
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": tiles.rows, "ADD": grad_total is not None}
    constants |= {"STAGES": tiles.stages, "num_warps": tiles.warps}
    kernel.launch(backward_kernel, (programs,), *read, grad_x, partial, rows, eps, **constants)
    if programs != 1:
        _launch_sum(partial, grad_weight)
    return grad_x, grad_weight


@_backward.register_fake
def _(x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return kernel.empty_like(x), kernel.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return *_backward(x, weight, grad, None, ctx.eps), None


def _setup_add_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _differentiate_add(
    ctx: Any, grad: Tensor | None, grad_total: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if grad is None:
        return grad_total, grad_total, None, None
    total, weight = ctx.saved_tensors
    grad_x, grad_weight = _backward(total, weight, grad, grad_total, ctx.eps)
    return grad_x, grad_x, grad_weight, None


rms_norm.register_autograd(_differentiate, setup_context=_setup_context)
add_rms_norm.register_autograd(_differentiate_add, setup_context=_setup_add_context)


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
