"""The Titans memory with chunked Triton kernels, forward and backward, registered as custom ops for torch.compile.

Backward saves only the inputs and recomputes everything else. Sums are fp32 and in a fixed order, so gradients are
deterministic. Tensors that pass between kernels, including the states, are rounded to the dtype of the inputs; the
gates and the returned state are not.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value, N: chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.gated_delta_rule import chunk_launch
from redline.ops.gated_delta_rule.chunk_launch import MOST_CHUNKS, ChunkLaunch, Tiles
from redline.ops.titans_memory import triton_backward as backward
from redline.ops.titans_memory import triton_forward as forward
from redline.ops.titans_memory.reference import TitansState, positions

_LARGEST_HEAD = 128
_SEQUENTIAL = (forward.state_kernel, backward.state_grad_kernel)
# The gate kernels process one row at a time, which one warp computes.
_SINGLE_WARP = (forward.gate_kernel, backward.gate_grad_kernel)


# The tiles of the kernels, by element size in bytes and by the padded number of channels of a key.
TILES = {
    **{(2, keys): Tiles(64, 4, 32, 4, 2) for keys in (16, 32, 64)},
    (2, 128): Tiles(64, 4, 16, 4, 2),
    **{(4, keys): Tiles(32, 4, 16, 4, 1) for keys in (16, 32, 64, 128)},
}
# This block of values is used if the sequential kernels would otherwise occupy at most half of the device.
FINE_VALUES = 16


def titans_memory(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    alpha_BSH: Tensor,
    eta_BSH: Tensor,
    theta_BSH: Tensor,
    state: TitansState | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, TitansState]:
    """Computes the same as the reference. Products use the widest dtype of q, k and v."""
    widest = torch.promote_types(torch.promote_types(q_BSHK.dtype, k_BSHK.dtype), v_BSHV.dtype)
    q, k, v = (tensor.to(widest) for tensor in (q_BSHK, k_BSHK, v_BSHV))
    keep, eta, theta = (tensor.float().transpose(1, 2) for tensor in (1 - alpha_BSH.float(), eta_BSH, theta_BSH))
    batch, tokens = q.shape[:2]
    position_B = torch.zeros(batch, dtype=torch.int32, device=q.device) if state is None else state.position_B
    position_BS, first_BS = positions(position_B, documents_BS, tokens)
    wrap = fresh = None
    if documents_BS is not None:
        # The first token of a document resets the state, so products of decays do not cross it.
        keep, eta = (tensor.masked_fill(first_BS[:, None], 0) for tensor in (keep, eta))
    if state is not None or documents_BS is not None:
        begin_N = torch.arange(0, tokens, chunk, device=q.device)
        wrap = (begin_N + chunk - position_BS[:, ::chunk] % chunk).to(torch.int32).contiguous()
        fresh = ((first_BS.cumsum(1) > 0) & (position_BS < chunk)).to(torch.int32).contiguous()
    matrices = (None, None, None) if state is None else tuple(matrix.float() for matrix in state[:3])
    gates = (tensor.contiguous() for tensor in (keep, eta, theta))
    o, memory, momentum, anchor = _forward(q, k, v, *gates, *matrices, wrap, fresh, chunk)
    position_B = ((position_BS[:, -1] + 1) % chunk).to(torch.int32)
    if fresh is not None:
        # If the call ends inside a document's first chunk, M₀ is still zero.
        still = (fresh[:, -1] == 1) & (position_B != 0)
        anchor = anchor.masked_fill(still[:, None, None, None], 0)
    return o.to(v_BSHV.dtype), TitansState(memory, momentum, anchor, position_B)


def why_not(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int) -> str:
    # The kernels may split each chunk into two parts, so they support only half of MOST_CHUNKS.
    too_long = chunk_launch.why_too_long(q_BSHK, MOST_CHUNKS // 2 * chunk)
    return chunk_launch.why_not(q_BSHK, k_BSHK, v_BSHV, chunk, _LARGEST_HEAD) or too_long


def launcher(q: Tensor, v: Tensor, wrap: Tensor | None, chunk: int) -> ChunkLaunch:
    (batch, tokens, heads, keys), values = q.shape, v.shape[-1]
    tiles, padded = TILES[q.element_size(), kernel.padded(keys)], kernel.padded(values)
    if 2 * batch * heads * -(-values // tiles.values) <= kernel.processors(q):
        tiles = replace(tiles, values=min(FINE_VALUES, tiles.values))
    block = min(tiles.block, max(kernel.padded(keys), padded))
    tiles, split = replace(tiles, block=block, values=min(tiles.values, padded)), 1 if wrap is None else 2
    states = batch, heads, split * -(-tokens // chunk), keys, values
    options: dict[str, object] = {"SPLIT": split, "PRECISION": kernel.dot_precision(q.dtype)}
    return ChunkLaunch(tiles, chunk, tokens, states, _SEQUENTIAL, _SINGLE_WARP, options)


@dataclass(frozen=True)
class Intermediates:
    """Intermediate tensors of the forward kernels that both passes need."""

    gain: Tensor
    momentum_gain: Tensor
    of_memory: Tensor
    of_momentum: Tensor
    products: Tensor
    last: Tensor
    whole: Tensor
    memories: Tensor
    momenta: Tensor
    anchors: Tensor
    errors: Tensor
    finals: tuple[Tensor, Tensor, Tensor]


def _run_forward_kernels(
    start: ChunkLaunch,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    first: tuple[Tensor | None, ...],
    wrap: Tensor | None,
    fresh: Tensor | None,
) -> Intermediates:
    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=k.device)

    chunks, size = start.states[:3], start.chunk
    gain, momentum_gain = fp32(*chunks, size, size), fp32(*chunks, size, size)
    of_memory, of_momentum, products = (torch.empty_like(gates[0]) for _ in range(3))
    last, whole = fp32(*chunks, 2, size), fp32(*chunks, 3)
    start(forward.gate_kernel, *gates, wrap, gain, momentum_gain, of_memory, of_momentum, products, last, whole)
    memories, momenta = (torch.empty(start.states, dtype=k.dtype, device=k.device) for _ in range(2))
    anchors = memories if wrap is None else torch.empty_like(memories)
    errors = torch.empty_like(v)
    memory, momentum, anchor = (fp32(*start.states[:2], *start.states[3:]) for _ in range(3))
    finals = memory, momentum, anchor
    start(forward.state_kernel, k, v, wrap, fresh, last, whole, *first, memories, momenta, anchors, errors, *finals)
    gains, states = (gain, momentum_gain, of_memory, of_momentum), (memories, momenta, anchors)
    return Intermediates(*gains, products, last, whole, *states, errors, finals)


def _empty_outputs(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return kernel.empty_like(v), *(torch.empty(shape, dtype=torch.float32, device=v.device) for _ in range(3))


@kernel.custom_op("titans_memory", _empty_outputs)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    eta: Tensor,
    theta: Tensor,
    memory: Tensor | None,
    momentum: Tensor | None,
    anchor: Tensor | None,
    wrap: Tensor | None,
    fresh: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, and the last memory, momentum and M₀."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    start = launcher(q, v, wrap, chunk)
    first = tuple(kernel.contiguous(matrix) for matrix in (memory, momentum, anchor))
    fwd = _run_forward_kernels(start, k, v, (keep, eta, theta), first, wrap, fresh)
    out = torch.empty_like(v)
    read = (fwd.gain, fwd.of_memory, fwd.of_momentum, fwd.memories, fwd.momenta, fwd.errors)
    start(forward.output_kernel, q, k, wrap, *read, out)
    final_memory, final_momentum, final_anchor = fwd.finals
    # Without split chunks, the final memory becomes the next M₀ only if the last chunk is full.
    if wrap is None and q.shape[1] % chunk == 0:
        final_anchor = final_memory.clone()
    return out, final_memory, final_momentum, final_anchor


@kernel.custom_op(
    "titans_memory_backward", lambda *inputs: [kernel.empty_like(one) for one in (*inputs[:6], *inputs[12:15])]
)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    eta: Tensor,
    theta: Tensor,
    memory: Tensor | None,
    momentum: Tensor | None,
    anchor: Tensor | None,
    wrap: Tensor | None,
    fresh: Tensor | None,
    grad_out: Tensor,
    grad_memory: Tensor,
    grad_momentum: Tensor,
    grad_anchor: Tensor,
    chunk: int,
) -> list[Tensor]:
    """Returns the gradients of q, k, v, keep, eta and theta, and of the initial memory, momentum and M₀."""
    q, k, v, grad_out = q.contiguous(), k.contiguous(), v.contiguous(), grad_out.contiguous()
    start = launcher(q, v, wrap, chunk)
    first = tuple(kernel.contiguous(matrix) for matrix in (memory, momentum, anchor))
    fwd = _run_forward_kernels(start, k, v, (keep, eta, theta), first, wrap, fresh)
    if wrap is None and q.shape[1] % chunk == 0:
        grad_memory, grad_anchor = grad_memory + grad_anchor, torch.zeros_like(grad_anchor)
    finals = tuple(grad.contiguous() for grad in (grad_memory, grad_momentum, grad_anchor))
    grad_local, grad_v, grad_q, grad_k = (torch.empty_like(tensor) for tensor in (v, v, q, k))
    grad_memories, grad_momenta = torch.empty_like(fwd.memories), torch.empty_like(fwd.momenta)
    firsts = tuple(torch.empty_like(grad) for grad in finals)
    start(backward.local_grad_kernel, q, k, wrap, fwd.gain, grad_out, grad_local)
    start(
        backward.state_grad_kernel, q, k, wrap, fresh, fwd.last, fwd.whole, fwd.of_memory, fwd.of_momentum,
        grad_out, grad_local, *finals, grad_v, grad_memories, grad_momenta, *firsts,
    )  # fmt: skip
    grad_gain, grad_of_memory, grad_of_momentum = (
        torch.empty_like(tensor) for tensor in (fwd.gain, fwd.of_memory, fwd.of_momentum)
    )
    start(
        backward.query_grad_kernel, q, k, wrap, fwd.gain, fwd.of_memory, fwd.of_momentum, fwd.memories,
        fwd.momenta, fwd.errors, grad_out, grad_q, grad_gain, grad_of_memory, grad_of_momentum,
    )  # fmt: skip
    grad_last, grad_whole = torch.empty_like(fwd.last), torch.empty_like(fwd.whole)
    start(
        backward.key_grad_kernel, q, k, wrap, fresh, fwd.gain, fwd.last, fwd.memories, fwd.momenta, fwd.anchors,
        fwd.errors, grad_out, grad_v, grad_memories, grad_momenta, grad_k, grad_last, grad_whole,
    )  # fmt: skip
    grad_keep, grad_eta, grad_theta = (torch.empty_like(keep) for _ in range(3))
    start(
        backward.gate_grad_kernel, keep, eta, wrap, fwd.gain, fwd.momentum_gain, fwd.of_memory, fwd.of_momentum,
        fwd.products, grad_gain, grad_of_memory, grad_of_momentum, grad_last, grad_whole,
        grad_keep, grad_eta, grad_theta,
    )  # fmt: skip
    return [grad_q, grad_k, grad_v, grad_keep, grad_eta, grad_theta, *firsts]


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    found = _backward(*ctx.saved_tensors, *grads, *ctx.options)
    matrices = (grad if needed else None for grad, needed in zip(found[6:], ctx.needs_input_grad[6:9], strict=True))
    return *found[:6], *matrices


kernel.differentiate(_forward, _differentiate)
