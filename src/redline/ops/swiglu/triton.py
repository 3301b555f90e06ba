"""SwiGLU's gating by Triton kernels, forward and backward, as operators that torch.compile sees as one node each.

Nothing is kept but the inputs: silu is computed anew in the backward pass, which writes both gradients at once, into
one tensor where gate and up came in one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Numbers and warps of a program."""

    block: int
    warps: int


TILES = {"forward": Tiles(1024, 4), "backward": Tiles(512, 4)}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The same as the reference."""
    return _forward(gate, up)


def packed_swiglu(gate_up: Tensor) -> Tensor:
    """The same as the reference."""
    return _packed_forward(gate_up)


def why_not(gate: Tensor) -> str:
    """Why the kernels cannot take this, or nothing."""
    return kernel.why_not(gate)


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
    gate, up, pull, gate_pull, up_pull, width, gate_stride, up_stride, blocks, pull_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """A "pull" is the gradient of what it names; `pull_stride` lies between rows of those that are written."""
    program = tl.program_id(0)
    row, start = (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < width - start
    place = row * pull_stride + start + column
    gates = tl.load(gate + row * gate_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + start + column, mask=inside, other=0.0).to(tl.float32)
    pulls = tl.load(pull + row * width + start + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    silu = gates * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    tl.store(gate_pull + place, (pulls * ups * slope).to(gate_pull.dtype.element_ty), mask=inside)
    tl.store(up_pull + place, (pulls * silu).to(up_pull.dtype.element_ty), mask=inside)


@torch.library.custom_op("redline::swiglu", mutates_args=())
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = _like(gate)
    _launch(forward_kernel, TILES["forward"], gate, up, out)
    return out


@_forward.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like(gate)


@torch.library.custom_op("redline::swiglu_backward", mutates_args=())
def _backward(gate: Tensor, up: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    gate_pull, up_pull = _like(gate), _like(gate)
    _launch(backward_kernel, TILES["backward"], gate, up, pull.contiguous(), gate_pull, up_pull)
    return gate_pull, up_pull


@_backward.register_fake
def _(gate: Tensor, up: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(gate)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return _backward(gate, up, pull)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("redline::packed_swiglu", mutates_args=())
def _packed_forward(gate_up: Tensor) -> Tensor:
    gate, up = _rows(gate_up).chunk(2, -1)
    out = _half_of(gate_up)
    _launch(forward_kernel, TILES["forward"], gate, up, out)
    return out


@_packed_forward.register_fake
def _(gate_up: Tensor) -> Tensor:
    return _half_of(gate_up)


@torch.library.custom_op("redline::packed_swiglu_backward", mutates_args=())
def _packed_backward(gate_up: Tensor, pull: Tensor) -> Tensor:
    both_pulls = _like(gate_up)
    gate, up = _rows(gate_up).chunk(2, -1)
    gate_pull, up_pull = _rows(both_pulls).chunk(2, -1)
    _launch(backward_kernel, TILES["backward"], gate, up, pull.contiguous(), gate_pull, up_pull)
    return both_pulls


@_packed_backward.register_fake
def _(gate_up: Tensor, pull: Tensor) -> Tensor:
    return _like(gate_up)


def _setup_packed_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_packed(ctx: Any, pull: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    return _packed_backward(gate_up, pull)


_packed_forward.register_autograd(_differentiate_packed, setup_context=_setup_packed_context)


def _launch(which: Any, tiles: Tiles, gate: Tensor, up: Tensor, *others: Tensor) -> None:
    """One long row where nothing lies between the rows; else a program stays within one."""
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
    """As (rows, width), without a copy where the rows lie at even distances."""
    x = x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    return x if x.stride(1) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Room for as many numbers, row after row, however x lies."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _half_of(gate_up: Tensor) -> Tensor:
    return torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)
