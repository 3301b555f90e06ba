"""Cross-entropy by Triton kernels, as operators that torch.compile sees as one node each.

Forward reads the logits once and keeps one number a row, the lse; backward reads them once more and writes their
gradient. The rows' losses are reduced by PyTorch, whose gradient is then the `grad` on each row: nothing waits for the
GPU, because the number of rows that count is never brought to the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.ops.cross_entropy.reference import reduced
from redline.ops.cross_entropy.triton_kernels import both_kernel, forward_kernel, gradient_kernel
from redline.ops.kernel import INTERPRETED, launch

__all__ = ["INTERPRETED", "cross_entropy", "write_both", "write_gradient", "write_loss"]


@dataclass(frozen=True)
class Tiles:
    """How work is cut: classes of a block, and warps of a program."""

    classes: int
    warps: int


# By bytes of a logit: at 4 warps each thread holds 32 (16) logits, and many programs share a multiprocessor.
FORWARD_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}
GRADIENT_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}
# So many warps that a multiprocessor holds one row, or two.
BOTH_TILES = {2: Tiles(16_384, 32), 4: Tiles(8192, 32)}


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The same as the reference."""
    loss_N, _ = _forward(logits_NV, target_N, ignore_index, label_smoothing, z_loss)
    return reduced(loss_N, target_N, ignore_index, reduction)


def write_loss(
    logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> None:
    """Fills `loss` and `lse` for logits whose rows are each contiguous."""
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
    """Fills `gradient`, which may be the logits themselves; `grad` is the gradient of each row's loss."""
    rows, classes = logits.shape
    block, warps = _block(GRADIENT_TILES, logits)
    strides = (logits.stride(0), gradient.stride(0))
    arguments = (logits, target, lse, grad, gradient, *strides, classes, ignore_index, smoothing, z_loss)
    launch(gradient_kernel, (rows * -(-classes // block),), *arguments, BLOCK=block, num_warps=warps)


def write_both(
    logits: Tensor, target: Tensor, grad: Tensor, loss: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> None:
    """Fills `loss`, and puts the logits' gradient in their place, in one pass."""
    rows, classes = logits.shape
    block, warps = _block(BOTH_TILES, logits)
    arguments = (logits, target, grad, loss, logits.stride(0), classes, ignore_index, smoothing, z_loss)
    launch(both_kernel, (rows,), *arguments, SMOOTH=smoothing != 0.0, BLOCK=block, num_warps=warps)


def _block(tiles: dict[int, Tiles], logits: Tensor) -> tuple[int, int]:
    chosen = tiles[logits.element_size()]
    return min(chosen.classes, 1 << (logits.shape[1] - 1).bit_length()), chosen.warps


def _with_contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@torch.library.custom_op("redline::cross_entropy", mutates_args=())
def _forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    loss, lse = _forward_fake(logits, target, ignore_index, smoothing, z_loss)
    write_loss(_with_contiguous_rows(logits), target.contiguous(), loss, lse, ignore_index, smoothing, z_loss)
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
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows = _with_contiguous_rows(logits)
    write_gradient(rows, target.contiguous(), lse, grad.contiguous(), gradient, ignore_index, smoothing, z_loss)
    return gradient


@_backward.register_fake
def _(
    logits: Tensor, target: Tensor, lse: Tensor, grad: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    gradient = None if grad is None else _backward(logits, target, lse, grad, *ctx.options)
    return gradient, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
