"""One decoding step of a neural memory layer in one Triton kernel. A program computes one head of one sequence.

All intermediate values are fp32. The reference rounds some of them to the model's dtype.

B: sequences, T: taps, C: channels, H: heads, K: channels of a key, V: channels of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel
from redline.ops.memory_step.reference import Learned, Projected

# The largest number of elements of a head's state that a program can hold, and how many of them each warp holds.
_MOST_ELEMENTS, _ELEMENTS_PER_WARP = 2**15, 1024


def memory_step(
    token: Projected, learned: Learned, recent_BTC: Tensor, state_BHKV: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same as the reference. The op has no gradient."""
    return _step([*token, *learned, recent_BTC, state_BHKV], eps)


def why_not(state_BHKV: Tensor, token: Projected, learned: Learned, recent_BTC: Tensor) -> str:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*token, *learned, recent_BTC, state_BHKV)):
        return "the kernel has no backward pass, and an input requires grad"
    if state_BHKV.dtype != torch.float32:
        return f"the state must be float32, not {str(state_BHKV.dtype).removeprefix('torch.')}"
    keys, values = state_BHKV.shape[2:]
    if kernel.padded(keys) * kernel.padded(values) > _MOST_ELEMENTS:
        return f"the state of a head may have at most {_MOST_ELEMENTS} elements, not {keys} × {values}"
    return kernel.why_not(token.mixed_BC)


@triton.jit
def _softplus(x):
    """Computes log(1 + e^x). Returns x if x > 20, because the difference is too small to matter for the decay."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _convolved(mixed, taps, recent, new_recent, at, mask, channels, TAPS: tl.constexpr):
    """Returns these channels after the convolution and SiLU, and writes the recent inputs for the next token."""
    token = tl.load(mixed + at, mask=mask, other=0.0)
    total = token.to(tl.float32) * tl.load(taps + (TAPS - 1) * channels + at, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(0, TAPS - 1):
        before = tl.load(recent + tap * channels + at, mask=mask, other=0.0)
        total += before.to(tl.float32) * tl.load(taps + tap * channels + at, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(new_recent + (tap - 1) * channels + at, before.to(new_recent.dtype.element_ty), mask=mask)
    if TAPS > 1:
        tl.store(new_recent + (TAPS - 2) * channels + at, token.to(new_recent.dtype.element_ty), mask=mask)
    return total * tl.sigmoid(total)


@triton.jit
def step_kernel(
    mixed, decay, strength, gate, taps, decay_bias, log_rate, norm, recent, state, gated, new_recent, new_state,
    heads, eps,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = heads * (2 * KEYS + VALUES)
    mixed += row * channels
    recent += row * (TAPS - 1) * channels
    new_recent += row * (TAPS - 1) * channels
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_k, in_v = k < KEYS, v < VALUES
    query = _convolved(mixed, taps, recent, new_recent, head * KEYS + k, in_k, channels, TAPS)
    key = _convolved(mixed, taps, recent, new_recent, (heads + head) * KEYS + k, in_k, channels, TAPS)
    value = _convolved(mixed, taps, recent, new_recent, 2 * heads * KEYS + head * VALUES + v, in_v, channels, TAPS)
    query /= tl.maximum(tl.sqrt(tl.sum(query * query, 0)), 1e-12)
    key /= tl.maximum(tl.sqrt(tl.sum(key * key, 0)), 1e-12)
    raw = tl.load(decay + row * heads + head).to(tl.float32) + tl.load(decay_bias + head).to(tl.float32)
    kept = tl.exp(-tl.exp(tl.load(log_rate + head).to(tl.float32)) * _softplus(raw))
    beta = tl.sigmoid(tl.load(strength + row * heads + head).to(tl.float32))
    matrix = (row * heads + head) * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    held = tl.load(state + matrix, mask=inside, other=0.0) * kept
    correction = beta * (value - tl.sum(held * key[:, None], 0))
    held += key[:, None] * correction[None, :]
    tl.store(new_state + matrix, held, mask=inside)
    read = tl.sum(held * query[:, None], 0)
    read *= tl.rsqrt(tl.sum(read * read, 0) / VALUES + eps)
    read *= tl.load(norm + v, mask=in_v, other=0.0).to(tl.float32)
    place = (row * heads + head) * VALUES + v
    read *= tl.sigmoid(tl.load(gate + place, mask=in_v, other=0.0).to(tl.float32))
    tl.store(gated + place, read.to(gated.dtype.element_ty), mask=in_v)


def _empty_outputs(tensors: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    (mixed, _, _, gate), (recent, state) = tensors[:4], tensors[-2:]
    gated = torch.empty(gate.shape, dtype=mixed.dtype, device=mixed.device)
    new_recent = torch.empty(recent.shape, dtype=mixed.dtype, device=mixed.device)
    return gated, new_recent, kernel.empty_like(state)


@kernel.custom_op("memory_step", _empty_outputs)
def _step(tensors: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernel with the fields of `Projected` and `Learned`, the recent inputs and the state."""
    batch, heads, keys, values = tensors[-1].shape
    outputs, taps = _empty_outputs(tensors, eps), tensors[-2].shape[1] + 1
    block_k, block_v = kernel.padded(keys), kernel.padded(values)
    sizes: dict[str, Any] = {"TAPS": taps, "KEYS": keys, "VALUES": values, "BLOCK_K": block_k, "BLOCK_V": block_v}
    warps = max(1, min(8, block_k * block_v // _ELEMENTS_PER_WARP))
    contiguous = [tensor.contiguous() for tensor in tensors]
    kernel.launch(step_kernel, (heads, batch), *contiguous, *outputs, heads, eps, **sizes, num_warps=warps)
    return outputs
