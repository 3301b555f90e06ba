"""Cross-entropy with Triton kernels, registered as custom ops for torch.compile.

Forward reads the logits once and saves one value per row, the logarithm of the sum of exponentials (lse). Backward
reads the logits again and writes their gradient. PyTorch reduces the losses of the rows, so autograd passes the
gradient of each row's loss, and the number of rows that are not ignored stays on the device: nothing synchronizes.

N: rows, V: classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.ops.cross_entropy.reference import reduced
from redline.ops.cross_entropy.triton_kernels import forward_kernel, gradient_kernel
from redline.ops.kernel import INTERPRETED, empty_like, launch, rows_contiguous

__all__ = ["INTERPRETED", "cross_entropy", "write_gradient", "write_loss"]


@dataclass(frozen=True)
class Tiles:
    """Classes per block, and warps per program."""

    classes: int
    warps: int


# Keyed by element size in bytes. With 4 warps each thread holds 32 logits of 2 bytes or 16 of 4 bytes, and many
# programs fit a multiprocessor.
FORWARD_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}
GRADIENT_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Computes the reference function."""
    loss_N, _ = _forward(logits_NV, target_N, ignore_index, label_smoothing, z_loss)
    return reduced(loss_N, target_N, ignore_index, reduction)


def write_loss(
    logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> None:
    """Writes `loss` and `lse`. Each row of the logits must be contiguous."""
    rows, classes = logits.shape
    block, warps = _block(FORWARD_TILES, logits)
    arguments = (logits, target, loss, lse, logits.stride(0), classes, ignore_index, smoothing, z_loss)
    launch(forward_kernel, (rows,), *arguments, SMOOTH=smoothing != 0.0, BLOCK=block, num_warps=warps)


def write_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    gradient: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """Writes the gradient of the logits, which may overwrite the logits. `grad` is the gradient of each row's loss."""
    rows, classes = logits.shape
    block, warps = _block(GRADIENT_TILES, logits)
    strides = (logits.stride(0), gradient.stride(0))
    arguments = (logits, target, lse, grad, gradient, *strides, classes, ignore_index, smoothing, z_loss)
    launch(gradient_kernel, (rows * -(-classes // block),), *arguments, BLOCK=block, num_warps=warps)


def _block(tiles: dict[int, Tiles], logits: Tensor) -> tuple[int, int]:
    chosen = tiles[logits.element_size()]
    return min(chosen.classes, 1 << (logits.shape[1] - 1).bit_length()), chosen.warps


@torch.library.custom_op("redline::cross_entropy", mutates_args=())
def _forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    loss, lse = _forward_fake(logits, target, ignore_index, smoothing, z_loss)
    write_loss(rows_contiguous(logits), target.contiguous(), loss, lse, ignore_index, smoothing, z_loss)
    return loss, lse


@_forward.register_fake
def _forward_fake(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    loss = torch.empty((logits.shape[0],), dtype=torch.float32, device=logits.device)
    return loss, torch.empty_like(loss)


@torch.library.custom_op("redline::cross_entropy_backward", mutates_args=())
def _backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    gradient = empty_like(logits)
    rows = rows_contiguous(logits)
    write_gradient(rows, target.contiguous(), lse, grad.contiguous(), gradient, ignore_index, smoothing, z_loss)
    return gradient


@_backward.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    gradient = None if grad is None else _backward(logits, target, lse, grad, *ctx.options)
    return gradient, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
