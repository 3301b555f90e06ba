"""Triton kernels of cross-entropy.

A forward program reads one row once, one block of classes at a time, and updates the running maximum and the sum of
exponentials. Ignored rows are not read. A backward program computes one block of one row from the row's lse. Only the
last block of a row is loaded with a mask, so an odd number of classes prevents wide loads in that block only. The loss
and gradient of a row are NaN if its target is not a class.
"""

# pyright: reportGeneralTypeIssues=false
# The type checker wrongly infers that a kernel that another kernel calls never returns.
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that blocks of -inf (classes that are excluded) give 0 instead of NaN.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _rescaled_sum(total, largest, x, new_largest):
    """Adds a block to the sum of exponentials and rescales it from the old maximum to `new_largest`."""
    return total * tl.exp2((largest - new_largest) * _LOG2_E) + tl.sum(tl.exp2((x - new_largest) * _LOG2_E), 0)


@triton.jit
def _statistics(start, end, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the lse of the `end` logits at `start`, and the sum of these logits."""
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
