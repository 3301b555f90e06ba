"""The gated delta rule by Triton kernels, forward and backward, as operators that torch.compile sees as one node each.

Backward keeps the inputs, the inverses T (as large as k) and the sums of the log decays; what else it needs it makes
anew, since memory is scarcer than the moment that takes. Sums are fp32 and in a fixed order: the same input gives the
same gradients, bit for bit. Between kernels numbers are rounded to the inputs' dtype, the states among them; the state
that is given back is not.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.gated_delta_rule import triton_backward as backward
from redline.ops.gated_delta_rule import triton_forward as forward
from redline.ops.kernel import INTERPRETED as INTERPRETED

CHUNKS = (16, 32, 64)
_LARGEST_HEAD = 256
_MOST_CHUNKS = 65_535  # what CUDA takes along a grid's second side
_SEQUENTIAL = (forward.state_kernel, backward.state_grad_kernel)


@dataclass(frozen=True)
class Tiles:
    """How work is cut: numbers of a block, warps of a program, steps of the loop in flight.

    A block of `values` of the state stays with one program from the first chunk to the last: few make many programs,
    many read the keys less often.
    """

    chunk: int
    block: int
    warps: int
    values: int
    state_warps: int
    stages: int


# By bytes of a number and keys of a padded head.
TILES = {
    (2, 16): Tiles(64, 64, 4, 32, 4, 2),
    (2, 32): Tiles(64, 64, 4, 32, 4, 2),
    (2, 64): Tiles(64, 64, 4, 32, 4, 2),
    (2, 128): Tiles(64, 64, 4, 32, 4, 2),
    (2, 256): Tiles(64, 64, 4, 32, 8, 1),
    (4, 16): Tiles(64, 32, 4, 16, 4, 1),
    (4, 32): Tiles(64, 32, 4, 16, 4, 1),
    (4, 64): Tiles(64, 32, 4, 16, 4, 1),
    (4, 128): Tiles(32, 32, 4, 16, 4, 1),
    (4, 256): Tiles(16, 32, 4, 16, 4, 1),
}
# A pass over the states with so few programs that half of the device would wait: more of them, that read further ahead.
FINE_VALUES, FINE_STAGES = 16, 3
# One with so many that wider ones would still be two for each processor: those read the keys half as often.
WIDE_VALUES = 64
RECUT_FOR = {(2, 16), (2, 32), (2, 64)}  # what fits into the shared memory of smaller GPUs too


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
    """The same as the reference; products are of numbers of the widest dtype of q, k and v."""
    widest = torch.promote_types(torch.promote_types(q_BSHK.dtype, k_BSHK.dtype), v_BSHV.dtype)
    q, k, v = (tensor.to(widest) for tensor in (q_BSHK, k_BSHK, v_BSHV))
    g_BHS, beta_BHS = (tensor.float().transpose(1, 2).contiguous() for tensor in (g_BSH, beta_BSH))
    state = None if state_BHKV is None else state_BHKV.float()
    documents = None if documents_BS is None else documents_BS.to(torch.int32)
    o_BSHV, state, _, _ = _forward(q, k, v, g_BHS, beta_BHS, state, documents, chunk)
    return o_BSHV.to(v_BSHV.dtype), state


def why_not(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, chunk: int) -> str:
    """Why the kernels cannot take this, or nothing."""
    largest = max(q_BSHK.shape[-1], v_BSHV.shape[-1])
    if largest > _LARGEST_HEAD:
        return f"it knows heads of up to {_LARGEST_HEAD} numbers, not {largest}"
    if chunk not in CHUNKS:
        return f"it knows chunks of 16, 32 and 64 tokens, not {chunk}"
    reason = kernel.why_not(q_BSHK) or kernel.why_not(k_BSHK) or kernel.why_not(v_BSHV)
    if not reason and q_BSHK.shape[1] > (longest := _MOST_CHUNKS * tiles_for(q_BSHK, v_BSHV, chunk).chunk):
        return f"it takes up to {longest} tokens at a time, not {q_BSHK.shape[1]}"
    return reason


def tiles_for(q: Tensor, v: Tensor, chunk: int) -> Tiles:
    """The chosen tiles, none larger than there is to fill them."""
    chosen = TILES[q.element_size(), _padded(q.shape[-1])]
    largest = max(_padded(q.shape[-1]), _padded(v.shape[-1]))
    return Tiles(
        min(chosen.chunk, chunk),
        min(chosen.block, largest),
        chosen.warps,
        min(chosen.values, _padded(v.shape[-1])),
        chosen.state_warps,
        chosen.stages,
    )


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _recut(tiles: Tiles, heads: int, values: int, processors: int) -> Tiles:
    """For as many programs as so many heads of so many values make."""
    if 2 * heads * -(-values // tiles.values) <= processors:
        return replace(tiles, values=min(FINE_VALUES, tiles.values), stages=FINE_STAGES)
    if heads * -(-values // WIDE_VALUES) >= 2 * processors:
        return replace(tiles, values=min(WIDE_VALUES, _padded(values)))
    return tiles


class Launch:
    """Starts kernels for inputs of one kind: a program a chunk, or one that goes through all chunks of a head."""

    def __init__(self, q: Tensor, v: Tensor, documents: Tensor | None, chunk: int) -> None:
        self.tiles = tiles_for(q, v, chunk)
        batch, self.tokens, self.heads, keys = q.shape
        if (q.element_size(), _padded(keys)) in RECUT_FOR:
            self.tiles = _recut(self.tiles, batch * self.heads, v.shape[-1], kernel.processors(q))
        self.states = batch, self.heads, -(-self.tokens // self.tiles.chunk), keys, v.shape[-1]
        self._packed = documents is not None
        self._precision = kernel.dot_precision(q.dtype)

    def __call__(self, name: Any, *arguments: Tensor | None) -> None:
        batch, heads, chunks, _, values = self.states
        # Heads first: those of a token lie next to each other, and are read at about the same time.
        grid = (batch * heads, -(-values // self.tiles.values) if name in _SEQUENTIAL else chunks)
        constants = self.constants(name) | self.options(name)
        kernel.launch(name, grid, *arguments, self.tokens, self.heads, **constants)

    def constants(self, name: Any) -> dict[str, object]:
        """What the kernel is compiled for."""
        known: dict[str, object] = {
            "KEYS": self.states[3],
            "VALUES": self.states[4],
            "BLOCK_K": self.tiles.block,
            "BLOCK_V": self.tiles.values if name in _SEQUENTIAL else self.tiles.block,
            "ALL_KEYS": _padded(self.states[3]),
            "C": self.tiles.chunk,
            "PACKED": self._packed,
            "PRECISION": self._precision,
        }
        return {key: value for key, value in known.items() if key in name.arg_names}

    def options(self, name: Any) -> dict[str, object]:
        if name in _SEQUENTIAL:
            return {"num_warps": self.tiles.state_warps, "num_stages": self.tiles.stages}
        # The inverse is made of blocks of 16 × 16, too small to be shared.
        return {"num_warps": 1 if name is forward.inverse_kernel else self.tiles.warps, "num_stages": 1}


@torch.library.custom_op("redline::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, the sums of the log decays, and the inverses."""
    q, k, v, documents = q.contiguous(), k.contiguous(), v.contiguous(), _contiguous(documents)
    out, final, decay, inverse = _forward_fake(q, k, v, g, beta, state, documents, chunk)
    start = Launch(q, v, documents, chunk)
    start(forward.inverse_kernel, k, g.contiguous(), beta.contiguous(), documents, decay, inverse)
    _, _, states, corrections = _states(start, k, v, beta, decay, documents, inverse, _contiguous(state), final)
    start(forward.output_kernel, q, k, decay, documents, states, corrections, out)
    return out, final, decay, inverse


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, heads, keys = q.shape
    chunk = tiles_for(q, v, chunk).chunk
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty((batch, heads, keys, v.shape[-1]), dtype=torch.float32, device=v.device)
    decay = torch.empty((batch, heads, tokens), dtype=torch.float32, device=v.device)
    inverse = torch.empty((batch, heads, -(-tokens // chunk), chunk, chunk), dtype=v.dtype, device=v.device)
    return out, final, decay, inverse


def _states(
    start: Launch,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    documents: Tensor | None,
    inverse: Tensor,
    initial: Tensor | None,
    final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W and U, the states that chunks begin with, and V′."""
    w, u, corrections = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    states = torch.empty(start.states, dtype=k.dtype, device=k.device)
    start(forward.solve_kernel, k, v, beta.contiguous(), decay, documents, inverse, w, u)
    start(forward.state_kernel, k, w, u, decay, documents, initial, states, corrections, final)
    return w, u, states, corrections


@torch.library.custom_op("redline::gated_delta_rule_backward", mutates_args=())
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
    """The gradients of q, k, v, g, beta and the first state."""
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    documents, grad_out = _contiguous(documents), grad_out.contiguous()
    start = Launch(q, v, documents, chunk)
    grad_initial = torch.empty((*start.states[:2], *start.states[3:]), dtype=torch.float32, device=v.device)
    unused = torch.empty_like(grad_initial)
    w, u, states, corrections = _states(start, k, v, beta, decay, documents, inverse, _contiguous(state), unused)
    grad_local, grad_correction, grad_states = (torch.empty_like(tensor) for tensor in (v, v, states))
    start(backward.local_grad_kernel, q, k, decay, documents, grad_out, grad_local)
    start(
        backward.state_grad_kernel, q, k, w, decay, documents, grad_out, grad_local, _contiguous(grad_final),
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


@_backward.register_fake
def _(
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
    batch, _, heads, keys = q.shape
    grad_initial = torch.empty((batch, heads, keys, v.shape[-1]), dtype=torch.float32, device=v.device)
    like_q, like_k, like_v = (torch.empty(tensor.shape, dtype=v.dtype, device=v.device) for tensor in (q, k, v))
    like_g, like_beta = (torch.empty(decay.shape, dtype=torch.float32, device=v.device) for _ in range(2))
    return like_q, like_k, like_v, like_g, like_beta, grad_initial


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, beta, state, documents, ctx.chunk = inputs
    ctx.save_for_backward(q, k, v, beta, state, documents, output[2], output[3])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint gives them a single time
    grad_out = torch.zeros_like(saved[2]) if grad_out is None else grad_out
    grads = _backward(*saved, grad_out, grad_final, ctx.chunk)
    return *grads[:5], grads[5] if ctx.needs_input_grad[5] else None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
