"""Attention of whole sequences inside a window of segments, and beyond it through a bias, in one softmax.

The plain form goes through blocks of queries; on a CUDA device flex attention skips what nobody sees, and our own
kernels, where they are asked for, are faster.

Shapes: B sequences of S tokens; H key-value heads of D channels, each shared by G queries.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from redline.models.memory.block_masks import LEAST_CHANNELS, SeenBlocks
from redline.models.memory.token_positions import Passage
from redline.nn.causal_attention import attention_to_the_last, stretches_are_faster
from redline.ops.dispatch import warn_once_traced

Far = tuple[Tensor, Tensor, Tensor]
# Queries at a time: enough for large products, few enough for the scores of long sequences.
_BLOCK = 512
# Since torch 2.9 it rounds fp32 to TF32 unless told otherwise (pytorch#161022): gradients were off by a hundredth.
_EXACT = {"FLOAT32_PRECISION": "'ieee'"}


def windowed_attention(
    query_BSQD: Tensor,
    key_BSHD: Tensor,
    value_BSHD: Tensor,
    passage: Passage,
    segment: int,
    window_segments: int,
    far: Far | None = None,
    implementation: str = "reference",
) -> Tensor:
    """Gives (B, S, Q, D). `far` is (query, key, bias_BS) for the tokens of the document that have left the window."""
    head_dim = query_BSQD.shape[-1]
    by_stretches = implementation == "auto" and stretches_are_faster(query_BSQD, head_dim)
    if by_stretches or implementation == "triton":
        lowest_BS = (passage.positions_BS // segment - window_segments).clamp(min=0) * segment
        before_BS, beyond = passage.positions_BS - lowest_BS, None if far is None else (*far, passage.positions_BS)
        return attention_to_the_last(query_BSQD, key_BSHD, value_BSHD, before_BS, beyond)
    if passage.seen is not None:
        by_flex_attention = _by_flex_attention if far is None else _apart
        return by_flex_attention(query_BSQD, key_BSHD, value_BSHD, passage.seen, far)
    if query_BSQD.is_cuda:
        warn_once_traced(f"attention with heads of {head_dim} channels is slow on a GPU: take 16 or more.")
    places = passage.positions_BS, passage.documents_BS, segment, window_segments
    return plain(query_BSQD, key_BSHD, value_BSHD, *places, far)


def plain(
    query_BSQD: Tensor,
    key_BSHD: Tensor,
    value_BSHD: Tensor,
    positions_BS: Tensor,
    documents_BS: Tensor | None,
    segment: int,
    window_segments: int,
    far: Far | None = None,
) -> Tensor:
    length, span = query_BSQD.shape[1], (window_segments + 1) * segment
    outputs = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        first = max(0, begin - span + 1) if far is None else 0
        asked, seen = slice(begin, end), slice(first, end)
        age = positions_BS[:, asked, None] // segment - positions_BS[:, None, seen] // segment
        earlier = torch.arange(first, end, device=age.device) <= torch.arange(begin, end, device=age.device)[:, None]
        same = earlier[None]
        if documents_BS is not None:
            same = same & (documents_BS[:, asked, None] == documents_BS[:, None, seen])
        near = logits(query_BSQD[:, asked], key_BSHD[:, seen])
        near = near.masked_fill(~(same & (age <= window_segments))[:, None, None], -torch.inf)
        if far is not None:
            far_query, far_key, bias = far
            beyond = logits(far_query[:, asked], far_key[:, seen]) + bias[:, None, None, None, seen]
            near = torch.where((same & (age > window_segments))[:, None, None], beyond, near)
        outputs.append(mix(near.softmax(-1), value_BSHD[:, seen]))
    return torch.cat(outputs, 1)


def attention_behind(
    query_BSQD: Tensor, key_BLHD: Tensor, value_BLHD: Tensor, positions_BL: Tensor, segment: int, span: int
) -> Tensor:
    """Gives (B, S, Q, D) for the last S of L tokens, of which those before position 0 are none; a window is `span`."""
    length, before = query_BSQD.shape[1], key_BLHD.shape[1] - query_BSQD.shape[1]
    key, value = key_BLHD.transpose(1, 2), value_BLHD.transpose(1, 2)
    shares = key_BLHD.shape[2] != query_BSQD.shape[2]  # only said where it is so: fewer kernels take it
    outputs = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        seen = slice(max(0, before + begin - span + 1), before + end)
        asked_BT1 = positions_BL[:, before + begin : before + end, None]
        there_B1K = positions_BL[:, None, seen]
        near = asked_BT1 // segment - there_B1K // segment < span // segment
        mask = near & (there_B1K <= asked_BT1) & (there_B1K >= 0)
        query = query_BSQD[:, begin:end].transpose(1, 2)
        there = key[:, :, seen], value[:, :, seen]
        outputs.append(F.scaled_dot_product_attention(query, *there, attn_mask=mask[:, None], enable_gqa=shares))
    return torch.cat(outputs, 2).transpose(1, 2)


def logits(query_BTQD: Tensor, key_BLHD: Tensor) -> Tensor:
    """Scaled products (B, H, G, T, L), in fp32 at the least."""
    heads, head_dim = key_BLHD.shape[-2:]
    number = torch.promote_types(query_BTQD.dtype, torch.float32)
    grouped = query_BTQD.unflatten(2, (heads, -1))
    return torch.einsum("bthgd,blhd->bhgtl", grouped, key_BLHD).to(number) * head_dim**-0.5


def mix(attention_BHGTL: Tensor, value_BLHD: Tensor) -> Tensor:
    """Values (B, T, Q, D) weighted by attention."""
    mixed = torch.einsum("bhgtl,blhd->bthgd", attention_BHGTL.to(value_BLHD.dtype), value_BLHD)
    return mixed.flatten(2, 3)


def _by_flex_attention(
    query_BSQD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, seen: SeenBlocks, far: Far | None
) -> Tensor:
    near, weight = _flex(query_BSQD, key_BSHD, value_BSHD, seen.near, None)
    if far is None:
        return near.transpose(1, 2)
    read_beyond = _beyond_in_order if torch.are_deterministic_algorithms_enabled() else _beyond
    beyond, far_weight = read_beyond(*far, value_BSHD, seen.beyond)
    share = (far_weight - weight).sigmoid().unsqueeze(-1).to(near.dtype)
    return torch.lerp(near, beyond, share).transpose(1, 2)


def _beyond(query: Tensor, key: Tensor, bias_BS: Tensor, value: Tensor, seen: Any) -> tuple[Tensor, Tensor]:
    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + bias_BS[b, k]

    return _flex(query, key, value, seen, biased)


def _beyond_in_order(query: Tensor, key: Tensor, bias_BS: Tensor, value: Tensor, seen: Any) -> tuple[Tensor, Tensor]:
    """The same without a bias, whose gradient all queries would add to in whatever order they finish.

    Values are weighted by e to the bias instead. What the shares would have to be divided by is read in a second pass,
    of the weights alone: beside the values they would be more channels than the kernels have room for.
    """
    # The largest weight is 1: where all are small, fp16 would have none.
    most_B1 = bias_BS.detach().amax(1, keepdim=True)
    weight_BS11 = (bias_BS - most_B1).exp()[..., None, None]
    mixed, lse = _flex(query, key, (weight_BS11 * value).to(value.dtype), seen, None)
    weights = (weight_BS11 * torch.ones_like(value[..., :LEAST_CHANNELS])).to(value.dtype)
    total = _flex(query, key, weights, seen, None)[0][..., 0].to(lse.dtype)
    # Nothing is seen by those whose document has not left the window.
    sees = total > 0
    total = torch.where(sees, total, 1)
    lse = torch.where(sees, lse + total.log() + most_B1[:, None], -torch.inf)
    return (mixed / total.unsqueeze(-1)).to(mixed.dtype), lse


# Where a bias is made in the same compiled graph as flex attention, gradients come out wrong (attention-gym#20): ours
# were off by up to their own size, the loss by nothing. Called outside of the graph, it is compiled on its own, and
# right.
_apart: Any = torch.compiler.disable(_by_flex_attention, reason="flex attention and its bias need two graphs")


def _flex(query_BSQD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, seen: Any, score: Any) -> tuple[Tensor, Tensor]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BSQD, key_BSHD, value_BSHD))
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    mixed, beside = attend(
        query,
        key,
        value,
        score_mod=score,
        block_mask=seen,
        enable_gqa=True,
        kernel_options=_EXACT if query.dtype == torch.float32 else None,
        return_aux=AuxRequest(lse=True),
    )
    return mixed, beside.lse


@cache
def _compiled() -> Any:
    """A model that is compiled compiles it too; on its own it would make something of the size of all pairs."""
    return torch.compile(flex_attention)
