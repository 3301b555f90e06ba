"""LayerNorm, dropout and ReLU on the GPU: a row stays in registers from its one reading to its writing.

Backward makes statistics and dropout's mask anew; programs are few and walk over many rows each, so that what each has
summed up for the gradients of weight and bias is small. A "pull" is the gradient of what it names.
"""

import triton
import triton.language as tl


@triton.jit
def _kept(seed, row, threshold, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """What dropout leaves, as the reference defines it: four columns share the four words of a counter."""
    group = tl.broadcast_to(tl.arange(0, BLOCK // 4)[None, :], (ROWS, BLOCK // 4))
    zero = tl.zeros((ROWS, BLOCK // 4), tl.int32)
    a, b, c, d = tl.philox(seed, group, zero + row[:, None], zero, zero)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (words >> 1).to(tl.int32) >= threshold


@triton.jit
def _normalised(value, column, eps, WIDTH: tl.constexpr):
    """Rows without their mean and of variance 1, zero beyond their end; and what they were multiplied by."""
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
    # Not a maximum: NaN must stay.
    result = tl.where(result < 0, 0.0, result)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold"])
def backward_kernel(
    x, weight, bias, seed, pull, x_pull, partial, rows, eps, threshold, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`partial` gets a row of sums from each program for the weight, and behind all of these one for the bias."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    biases = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weight_pull = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_pull = tl.zeros((ROWS, BLOCK), tl.float32)
    number = tl.load(seed)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * WIDTH + column
        inside = (row < rows)[:, None] & (column < WIDTH)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        pulls = tl.load(pull + place, mask=inside, other=0.0).to(tl.float32)
        normed, inverse = _normalised(value, column, eps, WIDTH)
        passed = normed * weights + biases > 0
        if DROP:
            passed = passed & _kept(number, row, threshold, BLOCK, ROWS)
        pulls = tl.where(passed, pulls * scale, 0.0)
        bias_pull += pulls
        weight_pull += pulls * normed
        scaled = pulls * weights
        mean = tl.sum(scaled, axis=1)[:, None] / WIDTH
        along = tl.sum(scaled * normed, axis=1)[:, None] / WIDTH
        result = (scaled - mean - normed * along) * inverse
        tl.store(x_pull + place, result.to(x_pull.dtype.element_ty), mask=inside)
    place = partial + program * WIDTH + tl.arange(0, BLOCK)
    there = tl.arange(0, BLOCK) < WIDTH
    tl.store(place, tl.sum(weight_pull, axis=0), mask=there)
    tl.store(place + programs * WIDTH, tl.sum(bias_pull, axis=0), mask=there)
