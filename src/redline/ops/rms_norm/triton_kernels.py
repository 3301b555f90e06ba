"""Triton kernels of RMSNorm. Each row is read once and stays in registers until the result is written.

A forward program computes ROWS rows. Backward launches few programs that loop over many rows each, which keeps the
partial sums of the weight's gradient few. It recomputes the statistics, which is faster than loading them. `grad_x` is
the gradient of `x`.
"""

import triton
import triton.language as tl


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
    """Writes one row of `partial` per program. With ADD, x is the stored sum, and `grad_total` is its own gradient."""
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
