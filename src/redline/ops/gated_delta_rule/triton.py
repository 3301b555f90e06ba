"""The gated delta rule with chunked Triton kernels, forward and backward, registered as custom ops for torch.compile.

Backward saves the inputs, the inverses T (as large as k) and the cumulative log decays, and recomputes everything else,
which takes little time and saves memory. Sums are fp32 and in a fixed order, so gradients are deterministic. Tensors
that pass between kernels, including the states, are rounded to the dtype of the inputs; the returned state is not.

B: sequences, S: tokens, H: heads, K: channels of a key, V: channels of a value.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.gated_delta_rule import chunk_launch
from redline.ops.gated_delta_rule import triton_backward as backward
from redline.ops.gated_delta_rule import triton_forward as forward
from redline.ops.gated_delta_rule.chunk_launch import MOST_CHUNKS, ChunkLaunch, Tiles

_LARGEST_HEAD = 256
_SEQUENTIAL = (forward.state_kernel, backward.state_grad_kernel)
# The inverse kernel works on blocks of 16 × 16, which are too small for several warps.
_SINGLE_WARP = (forward.inverse_kernel,)


# The tiles of the kernels, by element size in bytes and by the padded number of channels of a key.
TILES = {
    **{(2, keys): Tiles(64, 4, 32, 4, 2) for keys in (16, 32, 64, 128)},
    (2, 256): Tiles(64, 4, 32, 8, 1),
    **{(4, keys): Tiles(32, 4, 16, 4, 1) for keys in (16, 32, 64)},
    (4, 128): Tiles(32, 4, 16, 4, 1, chunk=32),
    (4, 256): Tiles(32, 4, 16, 4, 1, chunk=16),
}
# This block of values and these stages are used if the sequential kernels would otherwise occupy at most half of the
# device: small blocks make more programs, and more stages prefetch more.
FINE_VALUES, FINE_STAGES = 16, 3
# This block of values is used if it still makes two programs per multiprocessor. The keys are then read half as often
# as with the blocks of 32 values in `TILES`.
WIDE_VALUES = 64
# The entries of `TILES` for which these two blocks of values fit the shared memory of all GPUs.
RECUT_FOR = {(2, 16), (2, 32), (2, 64)}


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Computes the same as the reference. Products use the widest dtype of q, k and v."""
    widest = torch.promote_types(torch.promote_types(q_BSHK.dtype, k_BSHK.dtype), v_BSHV.dtype)
    q, k, v = (tensor.to(widest) for tensor in (q_BSHK, k_BSHK, v_BSHV))
    g_BHS, beta_BHS = (tensor.float().transpose(1, 2).contiguous() for tensor in (g_BSH, beta_BSH))
    state = None if state_BHKV is None else state_BHKV.float()
    documents = None if documents_BS is None else documents_BS.to(torch.int32)
    o_BSHV, state, _, _ = _forward(q, k, v, g_BHS, beta_BHS, state, documents, chunk)
    return o_BSHV.to(v_BSHV.dtype), state


def why_not(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int) -> str:
    reason = chunk_launch.why_not(q_BSHK, k_BSHK, v_BSHV, chunk, _LARGEST_HEAD)
    # The length is checked last, because `tiles_for` would fail for an unsupported dtype.
    return reason or chunk_launch.why_too_long(q_BSHK, MOST_CHUNKS * tiles_for(q_BSHK, v_BSHV, chunk).chunk)


def tiles_for(q: Tensor, v: Tensor, chunk: int) -> Tiles:
    """Returns the tiles from the table, reduced to the sizes of the inputs."""
    chosen = TILES[q.element_size(), kernel.padded(q.shape[-1])]
    largest = max(kernel.padded(q.shape[-1]), kernel.padded(v.shape[-1]))
    values = min(chosen.values, kernel.padded(v.shape[-1]))
    return replace(chosen, chunk=min(chosen.chunk, chunk), block=min(chosen.block, largest), values=values)


def _recut(tiles: Tiles, heads: int, values: int, processors: int) -> Tiles:
    """Adapts the block of values to the number of programs of the sequential kernels."""
    if 2 * heads * -(-values // tiles.values) <= processors:
        return replace(tiles, values=min(FINE_VALUES, tiles.values), stages=FINE_STAGES)
    if heads * -(-values // WIDE_VALUES) >= 2 * processors:
        return replace(tiles, values=min(WIDE_VALUES, kernel.padded(values)))
    return tiles


def launcher(q: Tensor, v: Tensor, documents: Tensor | None, chunk: int) -> ChunkLaunch:
    tiles = tiles_for(q, v, chunk)
    (batch, tokens, heads, keys), values = q.shape, v.shape[-1]
    if (q.element_size(), kernel.padded(keys)) in RECUT_FOR:
        tiles = _recut(tiles, batch * heads, values, kernel.processors(q))
    states = batch, heads, -(-tokens // tiles.chunk), keys, values
    options: dict[str, object] = {"PACKED": documents is not None, "PRECISION": kernel.dot_precision(q.dtype)}
    return ChunkLaunch(tiles, tiles.chunk, tokens, states, _SEQUENTIAL, _SINGLE_WARP, options)


def _empty_outputs(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, heads, keys = q.shape
    chunk = tiles_for(q, v, others[-1]).chunk
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty((batch, heads, keys, v.shape[-1]), dtype=torch.float32, device=v.device)
    decay = torch.empty((batch, heads, tokens), dtype=torch.float32, device=v.device)
    inverse = torch.empty((batch, heads, -(-tokens // chunk), chunk, chunk), dtype=v.dtype, device=v.device)
    return out, final, decay, inverse


@kernel.custom_op("gated_delta_rule", _empty_outputs)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, the last state, the cumulative log decays, and the inverses T."""
    q, k, v, documents = q.contiguous(), k.contiguous(), v.contiguous(), kernel.contiguous(documents)
    out, final, decay, inverse = _empty_outputs(q, k, v, chunk)
    start = launcher(q, v, documents, chunk)
    start(forward.inverse_kernel, k, g.contiguous(), beta.contiguous(), documents, decay, inverse)
    _, _, states, corrections = _states(start, k, v, beta, decay, documents, inverse, kernel.contiguous(state), final)
    start(forward.output_kernel, q, k, decay, documents, states, corrections, out)
    return out, final, decay, inverse


def _states(
    start: ChunkLaunch,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    documents: Tensor | None,
    inverse: Tensor,
    initial: Tensor | None,
    final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns W and U, the state at the start of each chunk, and V′ (see `triton_forward.py`)."""
    w, u, corrections = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    states = torch.empty(start.states, dtype=k.dtype, device=k.device)
    start(forward.solve_kernel, k, v, beta.contiguous(), decay, documents, inverse, w, u)
    start(forward.state_kernel, k, w, u, decay, documents, initial, states, corrections, final)
    return w, u, states, corrections


def _empty_grads(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *_: object) -> tuple[Tensor, ...]:
    batch, heads, keys = q.shape[0], *q.shape[2:]
    grad_initial = torch.empty((batch, heads, keys, v.shape[-1]), dtype=torch.float32, device=v.device)
    return *(kernel.empty_like(one) for one in (q, k, v, beta, beta)), grad_initial


@kernel.custom_op("gated_delta_rule_backward", _empty_grads)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
    decay: Tensor,
    inverse: Tensor,
    grad_out: Tensor,
    grad_final: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g, beta and the initial state."""
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    documents, grad_out = kernel.contiguous(documents), grad_out.contiguous()
    start = launcher(q, v, documents, chunk)
    grad_initial = torch.empty((*start.states[:2], *start.states[3:]), dtype=torch.float32, device=v.device)
    unused = torch.empty_like(grad_initial)
    w, u, states, corrections = _states(start, k, v, beta, decay, documents, inverse, kernel.contiguous(state), unused)
    grad_local, grad_correction, grad_states = (torch.empty_like(tensor) for tensor in (v, v, states))
    start(backward.local_grad_kernel, q, k, decay, documents, grad_out, grad_local)
    start(
        backward.state_grad_kernel, q, k, w, decay, documents, grad_out, grad_local, kernel.contiguous(grad_final),
        grad_correction, grad_states, grad_initial,
    )  # fmt: skip
    grad_q, k_part, grad_w, q_decay, k_decay = (torch.empty_like(tensor) for tensor in (q, k, w, decay, decay))
    read = q, k, decay, documents, states, corrections, grad_out
    start(backward.query_grad_kernel, *read, grad_q, q_decay)
    start(backward.key_grad_kernel, *read, grad_states, grad_correction, k_part, grad_w, k_decay)
    v_right, k_right = grad_local, torch.empty_like(k)
    start(backward.right_grad_kernel, inverse, grad_correction, grad_w, v_right, k_right)
    grad_k, grad_v, grad_g, grad_beta = (torch.empty_like(tensor) for tensor in (k, v, decay, beta))
    start(
        backward.system_grad_kernel, k, v, beta, decay, documents, w, u, v_right, k_right, k_part, q_decay, k_decay,
        grad_k, grad_v, grad_g, grad_beta,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once, because activation checkpointing unpacks them only once
    grad_out = torch.zeros_like(saved[2]) if grad_out is None else grad_out
    grads = _backward(*saved, grad_out, grad_final, *ctx.options)
    return *grads[:5], grads[5] if ctx.needs_input_grad[5] else None


kernel.differentiate(
    _forward,
    _differentiate,
    saved=lambda inputs, output: (*inputs[:3], *inputs[4:7], *output[2:]),
    materialize=False,
)
