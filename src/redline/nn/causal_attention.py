"""Attention of each token to those before it: whole rows, inside packed documents, inside a sliding window.

Whole rows go to PyTorch's fused attention, also where they come packed with one document each. A window or documents
need a mask there, all queries times all keys, so on a GPU in half precision they go to a kernel that takes borders and
a window instead: our own, or PyTorch's of variable length. Where gradients have to repeat, PyTorch's programs wait for
each other, and our own are the faster ones for whole rows too.

B: batch, S: tokens, H: heads, G: key and value heads, D: width of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from redline.nn.packing import Packing
from redline.ops.causal_attention import Far, auto_implementation
from redline.ops.causal_attention import causal_attention as attention_to_stretches
from redline.ops.dispatch import warn_once_traced

_HALF = (torch.float16, torch.bfloat16)
# Where our kernels were measured to be faster than PyTorch's.
_HEAD_DIMS = (64, 128)
# Newer versions of varlen_attn want to be told that there are fewer key heads; older ones see it.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if TorchVersion(torch.__version__) >= "2.13" else {}


def causal_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    window: int | None = None,
    packing: Packing | None = None,
    implementation: str = "reference",
) -> Tensor:
    """(B, S, H, D); a window counts the token itself, so that 1 sees nothing else.

    `reference` is PyTorch's own, `triton` our kernels, and `auto` what is faster of the two.
    """
    length = q_BSHD.shape[1]
    if window is not None and window >= length:
        window = None
    if packing is not None and packing.is_whole:
        packing = None
    whole = window is None and packing is None
    # Of whole rows PyTorch's kernels are the faster ones, but for gradients that repeat.
    ours = not whole or (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled())
    if implementation == "triton" or (
        implementation == "auto" and ours and span_kernels_are_faster(q_BSHD, q_BSHD.shape[-1])
    ):
        row = torch.arange(length, device=q_BSHD.device).expand(len(q_BSHD), -1)
        before_BS = row if packing is None else packing.positions_BS
        if window is not None:
            before_BS = before_BS.clamp(max=window - 1)
        return span_attention(q_BSHD, k_BSGD, v_BSGD, before_BS)
    if whole:
        return _fused(q_BSHD, k_BSGD, v_BSGD, None)
    if q_BSHD.is_cuda and q_BSHD.dtype in _HALF:
        return _variable_length(q_BSHD, k_BSGD, v_BSGD, window, packing)
    if q_BSHD.is_cuda:
        warn_once_traced(
            f"attention in {str(q_BSHD.dtype).removeprefix('torch.')} with documents or a window stores a mask of all "
            "queries times all keys, which is slow: take bf16 or fp16."
        )
    return _fused(q_BSHD, k_BSGD, v_BSGD, sight_mask(length, window, packing, q_BSHD.device))


def attention_with_past(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor) -> Tensor:
    """(B, S, H, D) of the last S of L tokens, each of which sees all that come before it."""
    (batch, length, heads, _), (whole, groups) = q_BSHD.shape, k_BLGD.shape[1:3]
    if q_BSHD.is_cuda and q_BSHD.dtype in _HALF:
        borders = [torch.arange(batch + 1, dtype=torch.int32, device=q_BSHD.device) * each for each in (length, whole)]
        return _between_borders(q_BSHD, k_BLGD, v_BLGD, (borders[0], borders[1]), None)
    if q_BSHD.is_cuda and heads != groups:
        # With a mask and shared heads no fused kernel takes them, and all scores would be stored.
        k_BLGD, v_BLGD = (t.repeat_interleave(heads // groups, dim=2) for t in (k_BLGD, v_BLGD))
    sees = torch.ones(length, whole, dtype=torch.bool, device=q_BSHD.device).tril(whole - length)
    return _fused(q_BSHD, k_BLGD, v_BLGD, sees[None, None])


def sight_mask(length: int, window: int | None, packing: Packing | None, device: torch.device) -> Tensor:
    """Who sees whom, (1 or B, 1, S, S)."""
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
    """Whether our kernels are the faster ones, for such tensors, where not all of a row is seen."""
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
    """(B, S, H, D) by our kernels, where each token sees itself and so many before it: none that the token before it
    does not see as well. `far` are other queries and keys, the bias of each key, and how many before a token are seen
    at all; those that are not near are seen by them."""
    index = torch.arange(before_BS.numel(), dtype=torch.int32, device=q_BSHD.device)
    q, k, v = (t.flatten(0, 1) for t in (q_BSHD, k_BSGD, v_BSGD))
    beyond = None
    if far is not None:
        far_q, far_k, bias, all_before = (t.flatten(0, 1) for t in far)
        beyond = Far(far_q, far_k, bias, index - all_before.int())
    lowest = index - before_BS.flatten().int()
    return attention_to_stretches(q, k, v, lowest, "triton", far=beyond).view_as(q_BSHD)


def _variable_length(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, window: int | None, packing: Packing | None
) -> Tensor:
    batch, length = q_BSHD.shape[:2]
    if packing is None:
        borders = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BSHD.device)
    else:
        borders = packing.borders
    return _between_borders(q_BSHD, k_BSGD, v_BSGD, (borders, borders), window)


def _between_borders(
    q_BSHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, borders: tuple[Tensor, Tensor], window: int | None
) -> Tensor:
    """Borders of queries and of keys; of both the last tokens stand together."""
    # Imported late: it brings the compiler along.
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q_BSHD, k_BLGD, v_BLGD))
    left, longest = -1 if window is None else window - 1, (q_BSHD.shape[1], k_BLGD.shape[1])
    mixed = varlen_attn(q, k, v, *borders, *longest, window_size=(left, 0), **_GROUPED)
    assert isinstance(mixed, Tensor)
    return mixed.view_as(q_BSHD)
