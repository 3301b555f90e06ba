"""Triton kernels of LayerNorm, dropout and ReLU. Each row is read once and stays in registers until it is written.

Backward recomputes the statistics and the dropout mask. It launches few programs that loop over many rows each, so that
there are few partial sums of the gradients of weight and bias. `grad_x` is the gradient of `x`.
"""

import triton
import triton.language as tl


@triton.jit
def _kept(seed, row, threshold, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Returns the dropout mask of the reference: four columns share the four words of one Philox counter."""
    group = tl.broadcast_to(tl.arange(0, BLOCK // 4)[None, :], (ROWS, BLOCK // 4))
    zero = tl.zeros((ROWS, BLOCK // 4), tl.int32)
    a, b, c, d = tl.philox(seed, group, zero + row[:, None], zero, zero)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (words >> 1).to(tl.int32) >= threshold


@triton.jit
def _normalised(value, column, eps, WIDTH: tl.constexpr):
    """Returns rows with zero mean and unit variance, zero beyond WIDTH, and their inverse standard deviation."""
    centred = tl.where(column < WIDTH, value - tl.sum(value, axis=1)[:, None] / WIDTH, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] / WIDTH + eps)
    return centred * inverse, inverse


@triton.jit(do_not_specialize=["rows", "threshold"])
def forward_kernel(
    x, weight, bias, seed, out, rows, eps, threshold, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + column
    inside = (row < rows)[:, None] & (column < WIDTH)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    biases = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed, _ = _normalised(value, column, eps, WIDTH)  # pyright: ignore[reportGeneralTypeIssues]
    result = normed * weights + biases
    if DROP:
        result = tl.where(_kept(tl.load(seed), row, threshold, BLOCK, ROWS), result * scale, 0.0)
    # tl.maximum would replace NaN by 0.
    result = tl.where(result < 0, 0.0, result)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold"])
def backward_kernel(
    x, weight, bias, seed, grad, grad_x, partial, rows, eps, threshold, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes one row of `partial` per program for the weight, followed by one row per program for the bias."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    biases = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    number = tl.load(seed)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * WIDTH + column
        inside = (row < rows)[:, None] & (column < WIDTH)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        normed, inverse = _normalised(value, column, eps, WIDTH)
        passed = normed * weights + biases > 0
        if DROP:
            passed = passed & _kept(number, row, threshold, BLOCK, ROWS)
        grads = tl.where(passed, grads * scale, 0.0)
        grad_bias += grads
        grad_weight += grads * normed
        scaled = grads * weights
        mean = tl.sum(scaled, axis=1)[:, None] / WIDTH
        along = tl.sum(scaled * normed, axis=1)[:, None] / WIDTH
        result = (scaled - mean - normed * along) * inverse
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
    place = partial + program * WIDTH + tl.arange(0, BLOCK)
    there = tl.arange(0, BLOCK) < WIDTH
    tl.store(place, tl.sum(grad_weight, axis=0), mask=there)
    tl.store(place + programs * WIDTH, tl.sum(grad_bias, axis=0), mask=there)
