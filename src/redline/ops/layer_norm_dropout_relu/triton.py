"""LayerNorm, dropout and ReLU with Triton kernels, registered as custom ops for torch.compile.

Each row is read once and stays in registers until it is written. Backward saves only the inputs and the seed, and
recomputes the statistics and the dropout mask. It launches few programs that loop over many rows each. Each program
writes one row of partial sums of the gradients of weight and bias, and the rows are added in a fixed order, so
gradients are deterministic. `grad_x` is the gradient of `x`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.layer_norm_dropout_relu.reference import threshold
from redline.ops.rms_norm.triton import Tiles

# The tiles, keyed by the largest padded row width for which they are used.
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
    if x.shape[-1] > _WIDEST:
        return f"rows may have at most {_WIDEST} elements, not {x.shape[-1]}"
    return kernel.why_not(x)


@triton.jit
def _kept(seed, row, threshold, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Returns the same dropout mask as the reference: four columns share the four words of one Philox counter."""
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
    normed, _ = _normalised(value, column, eps, WIDTH)
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
    """Writes `grad_x` and `partial`: one row per program for the weight, then one row per program for the bias."""
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


@kernel.custom_op("layer_norm_dropout_relu", lambda x, *_: kernel.empty_like(x))
def layer_norm_dropout_relu(x: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float, seed: Tensor) -> Tensor:
    """Computes the same as the reference and drops the same elements."""
    out, rows = kernel.empty_like(x), x.numel() // x.shape[-1]
    constants, tiles = _constants(FORWARD_TILES, x.shape[-1], p)
    tensors = (x.contiguous(), weight.contiguous(), bias.contiguous(), seed, out)
    grid = (-(-rows // tiles.rows),)
    kernel.launch(forward_kernel, grid, *tensors, rows, eps, threshold(p), 1 / (1 - p), **constants)
    return out


@kernel.custom_op(
    "layer_norm_dropout_relu_backward", lambda *inputs: tuple(kernel.empty_like(one) for one in inputs[:3])
)
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


kernel.differentiate(layer_norm_dropout_relu, lambda ctx, grad: _backward(*ctx.saved_tensors, grad, *ctx.options))


def _constants(choices: dict[int, Tiles], width: int, p: float) -> tuple[dict[str, object], Tiles]:
    block = kernel.padded(width)
    tiles = kernel.tiles_up_to(choices, block)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": tiles.rows, "DROP": p > 0, "num_warps": tiles.warps}
    return constants, tiles  # pyrefly: ignore[bad-return]
