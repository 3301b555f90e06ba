"""Attention for whole sequences: one softmax over a window of segments and, with a bias, over earlier tokens.

The reference processes blocks of queries. On a CUDA device flex attention skips masked blocks, and Redline's Triton
kernels are faster still where they are available.

Shapes: B sequences of S tokens; H key-value heads of D channels, each shared by G of the Q query heads.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from redline.models.memory.token_positions import LEAST_CHANNELS, BlockMasks, TokenPositions
from redline.nn.causal_attention import span_attention, span_kernels_are_faster
from redline.ops.dispatch import warn_once_traced

Far = tuple[Tensor, Tensor, Tensor]
# The number of queries per block: large enough for efficient products, small enough for the scores to fit in memory.
_BLOCK = 512
# Since torch 2.9 flex attention rounds fp32 to TF32 by default (pytorch#161022), with gradient errors of 1%.
_EXACT = {"FLOAT32_PRECISION": "'ieee'"}


def windowed_attention(
    query_BSQD: Tensor,
    key_BSHD: Tensor,
    value_BSHD: Tensor,
    positions: TokenPositions,
    segment: int,
    window_segments: int,
    far: Far | None = None,
    implementation: str = "reference",
) -> Tensor:
    """Returns (B, S, Q, D). `far` is (query, key, bias_BS) for attention to tokens that have left the window."""
    head_dim = query_BSQD.shape[-1]
    by_stretches = implementation == "auto" and span_kernels_are_faster(query_BSQD, head_dim)
    if by_stretches or implementation == "triton":
        lowest_BS = (positions.positions_BS // segment - window_segments).clamp(min=0) * segment
        before_BS, beyond = positions.positions_BS - lowest_BS, None if far is None else (*far, positions.positions_BS)
        return span_attention(query_BSQD, key_BSHD, value_BSHD, before_BS, beyond)
    if positions.block_masks is not None:
        by_flex_attention = _by_flex_attention if far is None else _outside_graph
        return by_flex_attention(query_BSQD, key_BSHD, value_BSHD, positions.block_masks, far)
    if query_BSQD.is_cuda:
        warn_once_traced(f"attention with a head dimension of {head_dim} is slow on a GPU: use 16 or more.")
    places = positions.positions_BS, positions.documents_BS, segment, window_segments
    return reference_attention(query_BSQD, key_BSHD, value_BSHD, *places, far)


def reference_attention(
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


def attention_of_last_tokens(
    query_BSQD: Tensor, key_BLHD: Tensor, value_BLHD: Tensor, positions_BL: Tensor, segment: int, span: int
) -> Tensor:
    """Returns (B, S, Q, D): the last S of L tokens attend to a window of `span`; positions below 0 are padding."""
    length, before = query_BSQD.shape[1], key_BLHD.shape[1] - query_BSQD.shape[1]
    key, value = key_BLHD.transpose(1, 2), value_BLHD.transpose(1, 2)
    grouped = key_BLHD.shape[2] != query_BSQD.shape[2]  # set only if needed: fewer kernels support enable_gqa
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
        outputs.append(F.scaled_dot_product_attention(query, *there, attn_mask=mask[:, None], enable_gqa=grouped))
    return torch.cat(outputs, 2).transpose(1, 2)


def logits(query_BTQD: Tensor, key_BLHD: Tensor) -> Tensor:
    """Returns the scaled products of queries and keys (B, H, G, T, L), in fp32 or higher precision."""
    heads, head_dim = key_BLHD.shape[-2:]
    number = torch.promote_types(query_BTQD.dtype, torch.float32)
    grouped = query_BTQD.unflatten(2, (heads, -1))
    return torch.einsum("bthgd,blhd->bhgtl", grouped, key_BLHD).to(number) * head_dim**-0.5


def mix(attention_BHGTL: Tensor, value_BLHD: Tensor) -> Tensor:
    """Returns the values (B, T, Q, D) weighted by attention."""
    mixed = torch.einsum("bhgtl,blhd->bthgd", attention_BHGTL.to(value_BLHD.dtype), value_BLHD)
    return mixed.flatten(2, 3)


def _by_flex_attention(
    query_BSQD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, masks: BlockMasks, far: Far | None
) -> Tensor:
    near, weight = _flex(query_BSQD, key_BSHD, value_BSHD, masks.near, None)
    if far is None:
        return near.transpose(1, 2)
    attend_beyond = _deterministic_beyond if torch.are_deterministic_algorithms_enabled() else _beyond
    beyond, far_weight = attend_beyond(*far, value_BSHD, masks.beyond)
    share = (far_weight - weight).sigmoid().unsqueeze(-1).to(near.dtype)
    return torch.lerp(near, beyond, share).transpose(1, 2)


def _beyond(query: Tensor, key: Tensor, bias_BS: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + bias_BS[b, k]

    return _flex(query, key, value, mask, biased)


def _deterministic_beyond(
    query: Tensor, key: Tensor, bias_BS: Tensor, value: Tensor, mask: Any
) -> tuple[Tensor, Tensor]:
    """Computes `_beyond` with a deterministic gradient of the bias.

    Flex attention sums the gradient of a score bias over queries in no fixed order. So this function adds no bias, but
    weights the values by exp(bias) instead. A second attention pass, with the weights as values, computes the
    normalizer. Appending the weights to the values would save this pass, but exceed the head dimension that the kernels
    support.
    """
    # Scaled so that the largest weight is 1; otherwise all weights could underflow in fp16.
    most_B1 = bias_BS.detach().amax(1, keepdim=True)
    weight_BS11 = (bias_BS - most_B1).exp()[..., None, None]
    mixed, lse = _flex(query, key, (weight_BS11 * value).to(value.dtype), mask, None)
    weights = (weight_BS11 * torch.ones_like(value[..., :LEAST_CHANNELS])).to(value.dtype)
    total = _flex(query, key, weights, mask, None)[0][..., 0].to(lse.dtype)
    # The sum of weights is 0 for queries without a token beyond the window.
    sees = total > 0
    total = torch.where(sees, total, 1)
    lse = torch.where(sees, lse + total.log() + most_B1[:, None], -torch.inf)
    return (mixed / total.unsqueeze(-1)).to(mixed.dtype), lse


# Gradients are wrong if a bias is computed in the same compiled graph as flex attention (attention-gym#20): by up to
# 100% here, with a correct loss. Outside of that graph, flex attention is compiled separately and is correct.
_outside_graph: Any = torch.compiler.disable(_by_flex_attention, reason="flex attention and its bias need two graphs")


def _flex(query_BSQD: Tensor, key_BSHD: Tensor, value_BSHD: Tensor, mask: Any, score: Any) -> tuple[Tensor, Tensor]:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BSQD, key_BSHD, value_BSHD))
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    mixed, beside = attend(
        query,
        key,
        value,
        score_mod=score,
        block_mask=mask,
        enable_gqa=True,
        kernel_options=_EXACT if query.dtype == torch.float32 else None,
        return_aux=AuxRequest(lse=True),
    )
    return mixed, beside.lse


@cache
def _compiled() -> Any:
    """Compiles flex attention for models that are not compiled; eager flex attention materializes all scores."""
    return torch.compile(flex_attention)
