"""Reference of one decoding step of a neural memory layer with the gated delta rule.

The step is a causal convolution over the last tokens, SiLU, normalization of queries and keys to unit length, one step
of the gated delta rule with learned decay and strength, RMSNorm of the output, and a sigmoid gate.

B: sequences, H: heads with keys of K and values of V channels, C = H · (2K + V): channels of queries, keys and values,
T: taps of the convolution, G = H · V. The state and all sums are fp32 (fp64 for fp64 inputs).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.gated_delta_rule.reference import gated_delta_step


class Projected(NamedTuple):
    """The projections of a token. The op applies softplus to the decay, and sigmoid to the strength and the gate."""

    mixed_BC: Tensor
    decay_BH: Tensor
    strength_BH: Tensor
    gate_BG: Tensor


class Learned(NamedTuple):
    """The learned parameters of the layer. The first tap applies to the oldest token."""

    taps_TC: Tensor
    decay_bias_H: Tensor
    log_rate_H: Tensor
    norm_V: Tensor


def memory_step(
    token: Projected, learned: Learned, recent_BTC: Tensor, state_BHKV: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    (_, heads, keys, values), exact = state_BHKV.shape, state_BHKV.dtype
    mixed = token.mixed_BC
    seen_BTC = torch.cat((recent_BTC.to(mixed.dtype), mixed[:, None]), 1)
    total_BC = F.silu((seen_BTC * learned.taps_TC).sum(1))
    query, key, value = total_BC.split([heads * keys, heads * keys, heads * values], -1)
    query, key = (F.normalize(one.unflatten(-1, (heads, keys)), dim=-1) for one in (query, key))
    g_BH = -learned.log_rate_H.to(exact).exp() * F.softplus(token.decay_BH.to(exact) + learned.decay_bias_H.to(exact))
    read, state_BHKV = gated_delta_step(
        query, key, value.unflatten(-1, (heads, values)), g_BH, token.strength_BH.sigmoid(), state_BHKV
    )
    gated = F.rms_norm(read, (values,), learned.norm_V, eps).flatten(1) * token.gate_BG.sigmoid()
    return gated, seen_BTC[:, 1:], state_BHKV
