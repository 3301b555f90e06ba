"""LayerNorm, dropout and ReLU with Triton kernels, registered as custom ops for torch.compile.

Backward saves only the input and the seed. Each program writes one row of partial sums of the gradients of weight and
bias, and the rows are added in a fixed order, so gradients are deterministic.
"""

from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.layer_norm_dropout_relu.reference import threshold
from redline.ops.layer_norm_dropout_relu.triton_kernels import backward_kernel, forward_kernel
from redline.ops.rms_norm.triton import Tiles

INTERPRETED = kernel.INTERPRETED


# Keyed by the largest padded row width.
FORWARD_TILES = {
    64: Tiles(32, 4),
    128: Tiles(16, 4),
    256: Tiles(8, 4),
    512: Tiles(4, 4),
    1024: Tiles(2, 4),
    2048: Tiles(1, 4),
    4096: Tiles(1, 8),
    8192: Tiles(1, 16),
    65536: Tiles(1, 32),
}
BACKWARD_TILES = {
    64: Tiles(16, 4, 6, 3),
    128: Tiles(8, 4, 6, 3),
    256: Tiles(4, 4, 6, 3),
    512: Tiles(2, 4, 6, 3),
    1024: Tiles(1, 4, 6, 3),
    2048: Tiles(1, 8, 3, 3),
    4096: Tiles(1, 16, 1, 3),
    8192: Tiles(1, 32, 1, 2),
    65536: Tiles(1, 32, 1, 1),
}
_WIDEST = max(FORWARD_TILES)


def why_not(x: Tensor) -> str:
    """Returns why the kernels do not support this input, or an empty string."""
    if x.shape[-1] > _WIDEST:
        return f"rows may have at most {_WIDEST} elements, not {x.shape[-1]}"
    return kernel.why_not(x)


@torch.library.custom_op("redline::layer_norm_dropout_relu", mutates_args=())
def layer_norm_dropout_relu(x: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float, seed: Tensor) -> Tensor:
    """Computes the reference function and drops the same elements."""
    out, rows = kernel.empty_like(x), x.numel() // x.shape[-1]
    constants, tiles = _constants(FORWARD_TILES, x.shape[-1], p)
    tensors = (x.contiguous(), weight.contiguous(), bias.contiguous(), seed, out)
    grid = (-(-rows // tiles.rows),)
    kernel.launch(forward_kernel, grid, *tensors, rows, eps, threshold(p), 1 / (1 - p), **constants)
    return out


@layer_norm_dropout_relu.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return kernel.empty_like(x)


@torch.library.custom_op("redline::layer_norm_dropout_relu_backward", mutates_args=())
def _backward(
    x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, grad: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, rows = kernel.empty_like(x), x.numel() // x.shape[-1]
    constants, tiles = _constants(BACKWARD_TILES, x.shape[-1], p)
    programs = min(-(-rows // tiles.rows), tiles.programs * kernel.processors(x))
    partial = torch.empty((2, programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    tensors = (x.contiguous(), weight.contiguous(), bias.contiguous(), seed, grad.contiguous(), grad_x, partial)
    numbers = (rows, eps, threshold(p), 1 / (1 - p))
    kernel.launch(backward_kernel, (programs,), *tensors, *numbers, STAGES=tiles.stages, **constants)
    grad_weight, grad_bias = partial.sum(1)
    return grad_x, grad_weight.to(weight.dtype, copy=True), grad_bias.to(bias.dtype, copy=True)


@_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return kernel.empty_like(x), kernel.empty_like(weight), kernel.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, float, Tensor], output: Tensor) -> None:
    x, weight, bias, ctx.p, ctx.eps, seed = inputs
    ctx.save_for_backward(x, weight, bias, seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    x, weight, bias, seed = ctx.saved_tensors
    return *_backward(x, weight, bias, seed, grad, ctx.p, ctx.eps), None, None, None


layer_norm_dropout_relu.register_autograd(_differentiate, setup_context=_setup_context)


def _constants(choices: dict[int, Tiles], width: int, p: float) -> tuple[dict[str, object], Tiles]:
    block = kernel.padded(width)
    tiles = kernel.tiles_up_to(choices, block)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": tiles.rows, "DROP": p > 0, "num_warps": tiles.warps}
    return constants, tiles
