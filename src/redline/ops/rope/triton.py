"""Rotary position embedding by one Triton kernel for queries and keys, as an operator that torch.compile sees whole.

A program turns all heads of one token, so that its cosines and sines are read once. The gradient is turned back by the
same kernel, and nothing but the tables is kept. A position that the tables do not have gives NaN: to check it first,
the host would have to wait for the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

INTERPRETED = kernel.INTERPRETED

_LARGEST_HEAD = 1024
# Numbers of one half of the channels that a program holds at once, and warps by how many they are at the most.
BLOCK = 2048
WARPS = {256: 1, 512: 2, 2048: 4}


def rope(
    q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, positions_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as the reference."""
    return _rope(q_BSHD, k_BSHD, cos_SD, sin_SD, positions_BS, False)


def why_not(q_BSHD: Tensor) -> str:
    """Why the kernel cannot take this, or nothing."""
    if q_BSHD.shape[-1] > _LARGEST_HEAD:
        return f"it takes heads of up to {_LARGEST_HEAD} channels, not {q_BSHD.shape[-1]}"
    return kernel.why_not(q_BSHD)


@triton.jit
def _turn(
    x, out, head_stride, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    """All heads of one token, which starts at `x`."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    for start in tl.static_range(0, HEADS, BLOCK_H):  # pyright: ignore[reportGeneralTypeIssues]
        head = start + tl.arange(0, BLOCK_H)[:, None]
        inside = (head < HEADS) & (channel < HALF)
        place = x + head.to(tl.int64) * head_stride + channel
        first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        target = out + head * (2 * HALF) + channel
        tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, table_rows,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_POSITIONS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    position = tl.load(positions + program).to(tl.int64) if HAS_POSITIONS else token
    channel = tl.arange(0, BLOCK_D)[None, :]
    known = (channel < HALF) & (position >= 0) & (position < table_rows)
    cosine = tl.load(cos + position * HALF + channel, mask=known, other=float("nan")).to(tl.float32)
    sine = tl.load(sin + position * HALF + channel, mask=known, other=float("nan")).to(tl.float32)
    if BACK:
        sine = -sine
    q += batch * q_batch_stride + token * q_token_stride
    k += batch * k_batch_stride + token * k_token_stride
    q_out += program * (Q_HEADS * 2 * HALF)
    k_out += program * (K_HEADS * 2 * HALF)
    _turn(q, q_out, q_head_stride, cosine, sine, Q_HEADS, HALF, BLOCK_Q, BLOCK_D)
    _turn(k, k_out, k_head_stride, cosine, sine, K_HEADS, HALF, BLOCK_K, BLOCK_D)


@torch.library.custom_op("redline::rope", mutates_args=())
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, back: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _like(q), _like(k)
    q, k = _channels_together(q), _channels_together(k)
    batch, tokens, heads, channels = q.shape
    half = channels // 2
    constants = _constants(heads, k.shape[2], half) | {"HAS_POSITIONS": positions is not None, "BACK": back}
    kernel.launch(
        rope_kernel,
        (batch * tokens,),
        *(q, k, q_out, k_out, cos.contiguous(), sin.contiguous()),
        None if positions is None else positions.contiguous(),
        *(tokens, cos.shape[0], *q.stride()[:3], *k.stride()[:3]),
        **constants,
    )
    return q_out, k_out


@_rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, back: bool) -> tuple[Tensor, Tensor]:
    return _like(q), _like(k)


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], output: tuple[Tensor, Tensor]
) -> None:
    _, _, cos, sin, positions, ctx.back = inputs
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
    cos, sin, positions = ctx.saved_tensors
    return *_rope(grad_q, grad_k, cos, sin, positions, not ctx.back), None, None, None, None


_rope.register_autograd(_differentiate, setup_context=_setup_context)


def _constants(q_heads: int, k_heads: int, half: int) -> dict[str, object]:
    block_d = kernel.padded(half, least=1)
    most = max(1, BLOCK // block_d)
    block_q, block_k = (min(most, kernel.padded(heads, least=1)) for heads in (q_heads, k_heads))
    numbers = max(block_q, block_k) * block_d
    warps = next((warps for largest, warps in sorted(WARPS.items()) if numbers <= largest), max(WARPS.values()))
    sizes: dict[str, object] = {"Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": half}
    return sizes | {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": block_d, "num_warps": warps}


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Room for as many numbers, token after token, however x lies."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
