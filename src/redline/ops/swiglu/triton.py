"""SwiGLU with Triton kernels, forward and backward, registered as custom ops for torch.compile.

Only the inputs are saved for backward, which recomputes silu and writes both gradients in one pass. For
`packed_swiglu` both gradients are written into one tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.kernel import why_not as why_not


@dataclass(frozen=True)
class Tiles:
    """Elements and warps per program."""

    block: int
    warps: int


TILES = {"forward": Tiles(1024, 4), "backward": Tiles(512, 4)}


@triton.jit
def forward_kernel(gate, up, out, width, gate_stride, up_stride, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, start = (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < width - start
    gates = tl.load(gate + row * gate_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    result = gates * tl.sigmoid(gates) * ups
    tl.store(out + row * width + start + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    gate, up, grad, grad_gate, grad_up, width, gate_stride, up_stride, blocks, grad_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes the gradients of gate and up, whose rows are `grad_stride` elements apart."""
    program = tl.program_id(0)
    row, start = (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < width - start
    place = row * grad_stride + start + column
    gates = tl.load(gate + row * gate_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    grads = tl.load(grad + row * width + start + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    silu = gates * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    tl.store(grad_gate + place, (grads * ups * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, (grads * silu).to(grad_up.dtype.element_ty), mask=inside)


@kernel.custom_op("swiglu", lambda gate, up: kernel.empty_like(gate))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = kernel.empty_like(gate)
    _launch(forward_kernel, TILES["forward"], gate, up, out)
    return out


@kernel.custom_op("swiglu_backward", lambda gate, up, grad: (kernel.empty_like(gate), kernel.empty_like(gate)))
def _backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = kernel.empty_like(gate), kernel.empty_like(gate)
    _launch(backward_kernel, TILES["backward"], gate, up, grad.contiguous(), grad_gate, grad_up)
    return grad_gate, grad_up


kernel.differentiate(swiglu, lambda ctx, grad: _backward(*ctx.saved_tensors, grad))


def _half_of(gate_up: Tensor) -> Tensor:
    return torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)


@kernel.custom_op("packed_swiglu", _half_of)
def packed_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = _rows(gate_up).chunk(2, -1)
    out = _half_of(gate_up)
    _launch(forward_kernel, TILES["forward"], gate, up, out)
    return out


@kernel.custom_op("packed_swiglu_backward", lambda gate_up, grad: kernel.empty_like(gate_up))
def _packed_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    grad_gate_up = kernel.empty_like(gate_up)
    gate, up = _rows(gate_up).chunk(2, -1)
    grad_gate, grad_up = _rows(grad_gate_up).chunk(2, -1)
    _launch(backward_kernel, TILES["backward"], gate, up, grad.contiguous(), grad_gate, grad_up)
    return grad_gate_up


kernel.differentiate(packed_swiglu, lambda ctx, grad: (_packed_backward(*ctx.saved_tensors, grad),))


def _launch(which: Any, tiles: Tiles, gate: Tensor, up: Tensor, *others: Tensor) -> None:
    """Treats contiguous inputs as one long row. Otherwise each program computes a block of one row."""
    if gate.is_contiguous() and up.is_contiguous():
        rows, width = 1, gate.numel()
    else:
        width = gate.shape[-1]
        gate, up = _rows(gate), _rows(up)
        rows = gate.shape[0]
    block = min(tiles.block, kernel.padded(width))
    blocks = -(-width // block)
    sizes = (width, *((width, width) if rows == 1 else (gate.stride(0), up.stride(0))), blocks)
    if which is backward_kernel:
        sizes = (*sizes, width if rows == 1 else _rows(others[-1]).stride(0))
    kernel.launch(which, (rows * blocks,), gate, up, *others, *sizes, BLOCK=block, num_warps=tiles.warps)


def _rows(x: Tensor) -> Tensor:
    """Returns x as (rows, width), copied only if it cannot be viewed with contiguous rows."""
    x = x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    return kernel.rows_contiguous(x)
