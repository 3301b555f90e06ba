"""RMSNorm by Triton kernels, forward and backward, as operators that torch.compile sees as one node each.

Backward needs nothing but the input. The weight's gradient is the sum of one row of partial sums from each program,
taken in a fixed order, so that the same input gives the same gradients, bit for bit.
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
    """Rows and warps of a program; backward, also programs a processor, and steps of the loop in flight."""

    rows: int
    warps: int
    programs: int = 0
    stages: int = 1


@dataclass(frozen=True)
class SumTiles:
    """Rows of partial sums and columns that a program adds up at a time, and its warps."""

    rows: int
    columns: int
    warps: int


# By the widest padded row that each is for: 32 numbers a thread forward (of each summand half as many),
# and 16 backward, which holds more of each.
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
# Nearly all rows that there are at once: adding them up takes as long as waiting for them.
SUM_TILES = SumTiles(512, 16, 8)
_WIDEST = max(FORWARD_TILES)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same as the reference."""
    return _forward(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same as the reference."""
    return _add_forward(x, residual, weight, eps)


def why_not(x: Tensor) -> str:
    """Why the kernels cannot take this, or nothing."""
    if x.shape[-1] > _WIDEST:
        return f"it takes rows of up to {_WIDEST} numbers, not {x.shape[-1]}"
    return kernel.why_not(x)


@torch.library.custom_op("redline::rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = _like(x)
    _launch_forward(x.contiguous(), None, weight, None, out, eps)
    return out


@_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _like(x)


@torch.library.custom_op("redline::add_rms_norm", mutates_args=())
def _add_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = _like(x), _like(x)
    _launch_forward(x.contiguous(), residual.contiguous(), weight, total, out, eps)
    return out, total


@_add_forward.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


@torch.library.custom_op("redline::rms_norm_backward", mutates_args=())
def _backward(x: Tensor, weight: Tensor, pull: Tensor, total_pull: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; `total_pull` is what comes from a sum that was given out beside the norm."""
    width, x_pull = x.shape[-1], _like(x)
    block, rows = kernel.padded(width), x.numel() // width
    tiles = _chosen(BACKWARD_TILES, block)
    programs = min(-(-rows // tiles.rows), tiles.programs * kernel.processors(x))
    weight_pull = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    # One program's sums are the whole.
    partial = weight_pull if programs == 1 else torch.empty((programs, width), dtype=torch.float32, device=x.device)
    read = (
        x.contiguous(),
        weight.contiguous(),
        pull.contiguous(),
        None if total_pull is None else total_pull.contiguous(),
    )
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": tiles.rows, "ADD": total_pull is not None}
    constants |= {"STAGES": tiles.stages, "num_warps": tiles.warps}
    kernel.launch(backward_kernel, (programs,), *read, x_pull, partial, rows, eps, **constants)
    if programs != 1:
        _launch_sum(partial, weight_pull)
    return x_pull, weight_pull


@_backward.register_fake
def _(x: Tensor, weight: Tensor, pull: Tensor, total_pull: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return *_backward(x, weight, pull, None, ctx.eps), None


def _setup_add_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _differentiate_add(
    ctx: Any, pull: Tensor | None, total_pull: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if pull is None:
        return total_pull, total_pull, None, None
    total, weight = ctx.saved_tensors
    x_pull, weight_pull = _backward(total, weight, pull, total_pull, ctx.eps)
    return x_pull, x_pull, weight_pull, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
_add_forward.register_autograd(_differentiate_add, setup_context=_setup_add_context)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    block, rows = kernel.padded(width), x.numel() // width
    tiles = _chosen(FORWARD_TILES, block)
    # With a sum there are two numbers to hold for each.
    share = tiles.rows if residual is None else max(1, tiles.rows // 2)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": share, "ADD": residual is not None}
    arguments = (x, residual, weight.contiguous(), total, out, rows, eps)
    kernel.launch(forward_kernel, (-(-rows // share),), *arguments, **constants, num_warps=tiles.warps)


def _launch_sum(partial: Tensor, weight_pull: Tensor) -> None:
    programs, width = partial.shape
    rows = min(SUM_TILES.rows, kernel.padded(programs))
    constants = {"WIDTH": width, "ROWS": rows, "COLUMNS": SUM_TILES.columns, "num_warps": SUM_TILES.warps}
    kernel.launch(sum_kernel, (-(-width // SUM_TILES.columns),), partial, weight_pull, programs, **constants)


def _chosen(choices: dict[int, Tiles], block: int) -> Tiles:
    return next(tiles for widest, tiles in sorted(choices.items()) if block <= widest)


def _like(x: Tensor) -> Tensor:
    """Room for as many numbers, row after row, however x lies."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
