"""Cross-entropy on the GPU: what one program of each kernel does.

Forward takes one row and reads it once, a block of classes at a time, keeping the largest logit so far and the sum of
exponentials below it; an ignored row is not read at all. Backward takes one block of one row, and needs of the row
nothing but its lse. Blocks that lie inside the row are read without a mask, so that an odd number of classes costs
wide loads only in its last block. A target that is no class gives NaN. Where the grad is known beforehand, one program
does both for a row: few rows at a time, so that the second reading finds them in the second-level cache.
"""

# pyright: reportGeneralTypeIssues=false
# A kernel called by another is, to a type checker, one that never returns.
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that blocks of minus infinity (classes that are ruled out) give 0 and not NaN.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _joined(total, largest, x, above):
    """The sum of exponentials below `above`, of what was summed below `largest` and of a block."""
    return total * tl.exp2((largest - above) * _LOG2_E) + tl.sum(tl.exp2((x - above) * _LOG2_E), 0)


@triton.jit
def _statistics(start, end, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """The lse of a row that ends at `end`, and the plain sum of its logits."""
    largest = tl.full((), _LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    plain = tl.full((), 0.0, tl.float32)
    whole = end // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        x = tl.load(start + first + tl.arange(0, BLOCK)).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, 0))
        total = _joined(total, largest, x, above)
        largest = above
        if SMOOTH:
            plain += tl.sum(x, 0)
    if whole < end:
        column = whole + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < end, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, 0))
        total = _joined(total, largest, x, above)
        largest = above
        if SMOOTH:
            plain += tl.sum(tl.where(column < end, x, 0.0), 0)
    return largest + tl.log(total), plain


@triton.jit
def _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss):
    """The gradient of a block of logits."""
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
def both_kernel(
    logits, target, grad, loss, row_stride, classes, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row, whose logits become their own gradient."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    wanted = tl.load(target + row).to(tl.int64)
    counts = wanted != ignore_index
    known = (wanted >= 0) & (wanted < classes)
    # Before the statistics, whose reductions all threads wait for: later another thread may have overwritten it.
    picked = tl.load(start + wanted, mask=known & counts, other=float("nan")).to(tl.float32)
    scale = tl.where(known & counts, tl.load(grad + row).to(tl.float32), float("nan"))
    log_sum, plain = _statistics(start, tl.where(counts, classes, 0), SMOOTH, BLOCK)
    value = log_sum - (1.0 - smoothing) * picked + z_loss * log_sum * log_sum
    if SMOOTH:
        value -= smoothing * (plain / classes)
    tl.store(loss + row, tl.where(counts, value, 0.0))
    right = tl.where(known, wanted, 0).to(tl.int32)
    whole = classes // BLOCK * BLOCK
    if counts:
        for first in range(0, whole, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(start + column).to(tl.float32)
            slope = _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss)
            tl.store(start + column, slope.to(logits.dtype.element_ty))
        if whole < classes:
            column = whole + tl.arange(0, BLOCK)
            x = tl.load(start + column, mask=column < classes, other=0.0).to(tl.float32)
            slope = _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss)
            tl.store(start + column, slope.to(logits.dtype.element_ty), mask=column < classes)
    else:
        for first in range(0, classes, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(start + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < classes)


@triton.jit
def gradient_kernel(
    logits, target, lse, grad, gradient, row_stride, gradient_stride, classes, ignore_index, smoothing, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`gradient` may be the logits' own memory; `grad` is the gradient of each row's loss."""
    blocks = tl.cdiv(classes, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    source = logits + row * row_stride + column
    sink = gradient + row * gradient_stride + column
    # All three are asked for before the first is needed.
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
        # The last block alone may end past the row.
        if first + BLOCK <= classes:
            x = tl.load(source).to(tl.float32)
        else:
            x = tl.load(source, mask=column < classes, other=0.0).to(tl.float32)
        slope = _slope(x, column, right, log_sum, scale, classes, smoothing, z_loss)
        if first + BLOCK <= classes:
            tl.store(sink, slope.to(gradient.dtype.element_ty))
        else:
            tl.store(sink, slope.to(gradient.dtype.element_ty), mask=column < classes)
