"""Rotary position embedding of queries and keys with one Triton kernel, registered as a custom op for torch.compile.

A program rotates all heads of one token, so the cosines and sines are read once. Backward applies the inverse rotation
with the same kernel and saves only the tables. A position outside the tables gives NaN, because a check would
synchronize with the device.

B: sequences, S: tokens, H: heads, D: head dimension.
"""

import triton
import triton.language as tl
from torch import Tensor

from redline.ops import kernel

_LARGEST_HEAD = 1024
# A block holds the first or second half of the channels of several heads, at most `BLOCK` elements. `WARPS` maps the
# largest number of elements of a block to the number of warps.
BLOCK = 2048
WARPS = {256: 1, 512: 2, 2048: 4}


def why_not(q_BSHD: Tensor) -> str:
    if q_BSHD.shape[-1] > _LARGEST_HEAD:
        return f"heads may have at most {_LARGEST_HEAD} channels, not {q_BSHD.shape[-1]}"
    return kernel.why_not(q_BSHD)


@triton.jit
def _rotate(
    x, out, head_stride, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rotates all heads of the token whose data starts at `x`."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    for start in tl.static_range(0, HEADS, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)[:, None]
        inside = (head < HEADS) & (channel < HALF)
        source = x + head.to(tl.int64) * head_stride + channel
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        target = out + head * (2 * HALF) + channel
        tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, table_rows,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    position = tl.load(positions + program).to(tl.int64) if HAS_POSITIONS else token
    channel = tl.arange(0, BLOCK_D)[None, :]
    known = (channel < HALF) & (position >= 0) & (position < table_rows)
    cosine = tl.load(cos + position * HALF + channel, mask=known, other=float("nan")).to(tl.float32)
    sine = tl.load(sin + position * HALF + channel, mask=known, other=float("nan")).to(tl.float32)
    if INVERSE:
        sine = -sine
    q += batch * q_batch_stride + token * q_token_stride
    k += batch * k_batch_stride + token * k_token_stride
    q_out += program * (Q_HEADS * 2 * HALF)
    k_out += program * (K_HEADS * 2 * HALF)
    _rotate(q, q_out, q_head_stride, cosine, sine, Q_HEADS, HALF, BLOCK_Q, BLOCK_D)
    _rotate(k, k_out, k_head_stride, cosine, sine, K_HEADS, HALF, BLOCK_K, BLOCK_D)


@kernel.custom_op("rope", lambda q, k, *_: (kernel.empty_like(q), kernel.empty_like(k)))
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the same as the reference, or with `inverse` the opposite rotation."""
    q_out, k_out = kernel.empty_like(q), kernel.empty_like(k)
    q, k = kernel.rows_contiguous(q), kernel.rows_contiguous(k)
    batch, tokens, heads, channels = q.shape
    half = channels // 2
    constants = _constants(heads, k.shape[2], half) | {"HAS_POSITIONS": positions is not None, "INVERSE": inverse}
    kernel.launch(
        rope_kernel,
        (batch * tokens,),
        *(q, k, q_out, k_out, cos.contiguous(), sin.contiguous()),
        kernel.contiguous(positions),
        *(tokens, cos.shape[0], *q.stride()[:3], *k.stride()[:3]),
        **constants,
    )
    return q_out, k_out


kernel.differentiate(
    rope,
    lambda ctx, grad_q, grad_k: rope(grad_q, grad_k, *ctx.saved_tensors, not ctx.options[0]),
    saved=lambda inputs, output: inputs[2:5],
)


def _constants(q_heads: int, k_heads: int, half: int) -> dict[str, object]:
    block_d = kernel.padded(half, least=1)
    most = max(1, BLOCK // block_d)
    block_q, block_k = (min(most, kernel.padded(heads, least=1)) for heads in (q_heads, k_heads))
    elements = max(block_q, block_k) * block_d
    warps = next((warps for largest, warps in sorted(WARPS.items()) if elements <= largest), max(WARPS.values()))
    sizes: dict[str, object] = {"Q_HEADS": q_heads, "K_HEADS": k_heads, "HALF": half}
    return sizes | {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": block_d, "num_warps": warps}
