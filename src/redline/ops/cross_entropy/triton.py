"""Cross-entropy with Triton kernels, registered as custom ops for torch.compile.

A forward program reads one row once, one block of classes at a time, and updates the running maximum and the sum of
exponentials. It saves the logarithm of that sum (lse), from which a backward program computes the gradient of one block
of one row. Ignored rows are not read. Only the last block of a row is loaded with a mask, so an odd number of classes
prevents wide loads in that block only. The loss and gradient of a row are NaN if its target is not a class.

The losses of the rows are reduced by operations of PyTorch on the device, so nothing synchronizes, and autograd passes
the gradient of each row's loss to backward.

N: rows, V: classes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.cross_entropy.reference import reduced
from redline.ops.kernel import why_not as why_not


@dataclass(frozen=True)
class Tiles:
    """Classes per block, and warps per program."""

    classes: int
    warps: int


# The tiles by element size in bytes. With 4 warps each thread holds 32 logits of 2 bytes or 16 of 4 bytes, and many
# programs fit a multiprocessor.
FORWARD_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}
GRADIENT_TILES = {2: Tiles(4096, 4), 4: Tiles(2048, 4)}


_LOG2_E = tl.constexpr(1.4426950408889634)
# The initial running maximum. It is finite, so that a block of excluded classes, with logits of -inf, adds 0, not NaN.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _rescaled_sum(total, largest, x, new_largest):
    """Rescales the sum of exponentials from the old maximum to `new_largest`, and adds the block x."""
    return total * tl.exp2((largest - new_largest) * _LOG2_E) + tl.sum(tl.exp2((x - new_largest) * _LOG2_E), 0)


@triton.jit
def _statistics(start, end, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the log-sum-exp of the `end` logits from `start` on, and with SMOOTH also the sum of these logits."""
    largest = tl.full((), _LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    plain = tl.full((), 0.0, tl.float32)
    whole = end // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        x = tl.load(start + first + tl.arange(0, BLOCK)).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = _rescaled_sum(total, largest, x, new_largest)
        largest = new_largest
        if SMOOTH:
            plain += tl.sum(x, 0)
    if whole < end:
        column = whole + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < end, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = _rescaled_sum(total, largest, x, new_largest)
        largest = new_largest
        if SMOOTH:
            plain += tl.sum(tl.where(column < end, x, 0.0), 0)
    return largest + tl.log(total), plain


@triton.jit
def _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss):
    """Returns the gradient of a block of logits."""
    slope = tl.exp2((x - log_sum) * _LOG2_E) * (1.0 + 2.0 * z_loss * log_sum) - smoothing / classes
    return tl.where(column == right, slope - (1.0 - smoothing), slope) * scale


@triton.jit
def forward_kernel(
    logits, target, loss, lse, row_stride, classes, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    wanted = tl.load(target + row).to(tl.int64)
    counts = wanted != ignore_index
    known = (wanted >= 0) & (wanted < classes)
    log_sum, plain = _statistics(start, tl.where(counts, classes, 0), SMOOTH, BLOCK)
    picked = tl.load(start + wanted, mask=known & counts, other=float("nan")).to(tl.float32)
    value = log_sum - (1.0 - smoothing) * picked + z_loss * log_sum * log_sum
    if SMOOTH:
        value -= smoothing * (plain / classes)
    tl.store(loss + row, tl.where(counts, value, 0.0))
    tl.store(lse + row, log_sum)


@triton.jit
def gradient_kernel(
    logits, target, lse, grad, gradient, row_stride, gradient_stride, classes, ignore_index, smoothing, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes `gradient`, which may alias the logits. `grad` is the gradient of each row's loss."""
    blocks = tl.cdiv(classes, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    source = logits + row * row_stride + column
    sink = gradient + row * gradient_stride + column
    # All three loads are issued before the first result is needed.
    wanted = tl.load(target + row).to(tl.int64)
    log_sum = tl.load(lse + row)
    grad_row = tl.load(grad + row).to(tl.float32)
    if wanted == ignore_index:
        zero = tl.zeros((BLOCK,), gradient.dtype.element_ty)
        tl.store(sink, zero, mask=column < classes)
    else:
        known = (wanted >= 0) & (wanted < classes)
        scale = tl.where(known, grad_row, float("nan"))
        right = tl.where(known, wanted, 0).to(tl.int32)
        # Only the last block may extend past the row.
        if first + BLOCK <= classes:
            x = tl.load(source).to(tl.float32)
        else:
            x = tl.load(source, mask=column < classes, other=0.0).to(tl.float32)
        slope = _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss)
        if first + BLOCK <= classes:
            tl.store(sink, slope.to(gradient.dtype.element_ty))
        else:
            tl.store(sink, slope.to(gradient.dtype.element_ty), mask=column < classes)


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    loss_N, _ = _forward(logits_NV, target_N, ignore_index, label_smoothing, z_loss)
    return reduced(loss_N, target_N, ignore_index, reduction)


def write_loss(
    logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> None:
    """Writes `loss` and `lse`. Each row of the logits must be contiguous."""
    rows, classes = logits.shape
    block, warps = _block(FORWARD_TILES, logits)
    arguments = (logits, target, loss, lse, logits.stride(0), classes, ignore_index, smoothing, z_loss)
    kernel.launch(forward_kernel, (rows,), *arguments, SMOOTH=smoothing != 0.0, BLOCK=block, num_warps=warps)


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
    kernel.launch(gradient_kernel, (rows * -(-classes // block),), *arguments, BLOCK=block, num_warps=warps)


def _block(tiles: dict[int, Tiles], logits: Tensor) -> tuple[int, int]:
    chosen = tiles[logits.element_size()]
    return min(chosen.classes, 1 << (logits.shape[1] - 1).bit_length()), chosen.warps


def _empty_outputs(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    loss = torch.empty((logits.shape[0],), dtype=torch.float32, device=logits.device)
    return loss, torch.empty_like(loss)


@kernel.custom_op("cross_entropy", _empty_outputs)
def _forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    loss, lse = _empty_outputs(logits)
    write_loss(kernel.rows_contiguous(logits), target.contiguous(), loss, lse, ignore_index, smoothing, z_loss)
    return loss, lse


@kernel.custom_op("cross_entropy_backward", lambda logits, *_: kernel.empty_like(logits))
def _backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    gradient = kernel.empty_like(logits)
    rows = kernel.rows_contiguous(logits)
    write_gradient(rows, target.contiguous(), lse, grad.contiguous(), gradient, ignore_index, smoothing, z_loss)
    return gradient


kernel.differentiate(
    _forward,
    lambda ctx, grad, _: () if grad is None else (_backward(*ctx.saved_tensors, grad, *ctx.options),),
    saved=lambda inputs, output: (*inputs[:2], output[1]),
    materialize=False,
)
