"""Causal attention over whole sequences, packed documents, or a sliding window.

Whole sequences use PyTorch's fused attention. For a window or packed documents, PyTorch's fused attention would need a
mask of all queries times all keys, so in half precision on a GPU these cases use `redline.ops.causal_attention` or
PyTorch's variable-length attention. If gradients must be deterministic, PyTorch's kernels serialize their programs, so
`redline.ops` is faster for whole sequences too.

B: batch, S: tokens, L: tokens including cached ones, H: query heads, G: key and value heads, D: head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from redline.nn.packing import Packing
from redline.ops.causal_attention import Far, auto_implementation
from redline.ops.causal_attention import causal_attention as span_attention_op
from redline.ops.dispatch import warn_once_traced

_HALF = (torch.float16, torch.bfloat16)
# Head dimensions for which the kernels of redline.ops were measured to be faster than PyTorch's.
_HEAD_DIMS = (64, 128)
# Newer versions of varlen_attn need this argument for grouped heads; older ones infer it.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if TorchVersion(torch.__version__) >= "2.13" else {}


def causal_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    window: int | None = None,
    packing: Packing | None = None,
    implementation: str = "reference",
) -> Tensor:
    """Returns (B, S, H, D). `window` counts the token itself: with a window of 1, a token sees only itself.

    `reference` is PyTorch's attention, `triton` the kernels of redline.ops, and `auto` the faster of the two.
    """
    length = q_BSHD.shape[1]
    if window is not None and window >= length:
        window = None
    if packing is not None and packing.is_whole:
        packing = None
    whole = window is None and packing is None
    # PyTorch is faster for whole sequences, unless gradients must be deterministic.
    prefers_ops = not whole or (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled())
    if implementation == "triton" or (
        implementation == "auto" and prefers_ops and span_kernels_are_faster(q_BSHD, q_BSHD.shape[-1])
    ):
        row = torch.arange(length, device=q_BSHD.device).expand(len(q_BSHD), -1)
        before_BS = row if packing is None else packing.positions_BS
        if window is not None:
            before_BS = before_BS.clamp(max=window - 1)
        return span_attention(q_BSHD, k_BSGD, v_BSGD, before_BS)
    if whole:
        return _fused(q_BSHD, k_BSGD, v_BSGD, None)
    if q_BSHD.is_cuda and q_BSHD.dtype in _HALF:
        if packing is None:
            tokens = len(q_BSHD) * length
            cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=q_BSHD.device)
        else:
            cu_seqlens = packing.borders
        return _varlen(q_BSHD, k_BSGD, v_BSGD, (cu_seqlens, cu_seqlens), window)
    if q_BSHD.is_cuda:
        warn_once_traced(
            f"attention in {str(q_BSHD.dtype).removeprefix('torch.')} with packed documents or a sliding window "
            "stores a mask of all queries times all keys, which is slow. Use bf16 or fp16."
        )
    return _fused(q_BSHD, k_BSGD, v_BSGD, sight_mask(length, window, packing, q_BSHD.device))


def attention_with_past(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
    """Returns the attention of the last S of L tokens, (B, S, H, D). Each token sees all tokens up to itself."""
    (batch, length, heads, _), (whole, groups) = q_BSHD.shape, k_BLGD.shape[1:3]
    if q_BSHD.is_cuda and q_BSHD.dtype in _HALF:
        cu_seqlens = [
            torch.arange(batch + 1, dtype=torch.int32, device=q_BSHD.device) * each for each in (length, whole)
        ]
        return _varlen(q_BSHD, k_BLGD, v_BLGD, (cu_seqlens[0], cu_seqlens[1]), None)
    if q_BSHD.is_cuda and heads != groups:
        # No fused kernel supports a mask with grouped heads, so without this copy PyTorch would store all scores.
        k_BLGD, v_BLGD = (t.repeat_interleave(heads // groups, dim=2) for t in (k_BLGD, v_BLGD))
    sees = torch.ones(length, whole, dtype=torch.bool, device=q_BSHD.device).tril(whole - length)
    return _fused(q_BSHD, k_BLGD, v_BLGD, sees[None, None])


def sight_mask(length: int, window: int | None, packing: Packing | None, device: torch.device) -> Tensor:
    """Returns the boolean mask (1 or B, 1, S, S), True where a query sees a key."""
    index = torch.arange(length, device=device)
    ago = index[:, None] - index
    sees = ago >= 0
    if window is not None:
        sees &= ago < window
    sees_BSS = sees[None] if packing is None else sees & packing.same_BSS
    return sees_BSS[:, None]


def _fused(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def span_kernels_are_faster(like: Tensor, head_dim: int) -> bool:
    """Returns whether redline.ops is faster than PyTorch for windows and packed documents of tensors like this one."""
    return _kernels_are_faster(like, head_dim) and auto_implementation(like, head_dim) == "triton"


def _kernels_are_faster(like: Tensor, head_dim: int) -> bool:
    return like.is_cuda and like.dtype in _HALF and head_dim in _HEAD_DIMS


def span_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    before_BS: Tensor,
    far: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns (B, S, H, D) with the kernels of redline.ops. Each token sees itself and `before_BS` tokens before it.

    The index of the first token that a token sees must not decrease from one token to the next. `far` makes tokens see
    further back: it holds separate queries and keys, a bias per key, and the total number of tokens that each token
    sees before itself. The tokens that are further back than `before_BS` are scored with the queries, keys and biases
    of `far`.
    """
    index = torch.arange(before_BS.numel(), dtype=torch.int32, device=q_BSHD.device)
    q, k, v = (t.flatten(0, 1) for t in (q_BSHD, k_BSGD, v_BSGD))
    beyond = None
    if far is not None:
        far_q, far_k, bias, all_before = (t.flatten(0, 1) for t in far)
        beyond = Far(far_q, far_k, bias, index - all_before.int())
    lowest = index - before_BS.flatten().int()
    return span_attention_op(q, k, v, lowest, "triton", far=beyond).view_as(q_BSHD)


def _varlen(
    q_BSHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, cu_seqlens: tuple[Tensor, Tensor], window: int | None
) -> Tensor:
    """Computes variable-length attention. The last query of each sequence is aligned with the last key."""
    # Imported only when needed, because `torch.nn.attention.varlen` imports the whole compiler.
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q_BSHD, k_BLGD, v_BLGD))
    left, longest = -1 if window is None else window - 1, (q_BSHD.shape[1], k_BLGD.shape[1])
    mixed = varlen_attn(q, k, v, *cu_seqlens, *longest, window_size=(left, 0), **_GROUPED)
    assert isinstance(mixed, Tensor)
    return mixed.view_as(q_BSHD)
