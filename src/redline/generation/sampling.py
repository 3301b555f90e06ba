"""Samples one token per row of logits on the device, each row with its own settings.

The settings are tensors with one number per row, and `Form` says which of them any row uses, so that the work for the
others is skipped. A row's token does not depend on the other rows. The sampled token is the argmax of the logits plus
Gumbel noise, which needs no synchronization. The noise is a hash of the row's seed, the position and the token, so that
a text does not depend on CUDA graphs or on the device either.

N: rows, V: vocabulary, M: rows that use a setting.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF
# At lower temperatures, noise has no effect, and dividing the logits by the temperature could overflow fp32.
LEAST_TEMPERATURE = 1e-20
# Returned in place of a token if the logits are not finite.
NO_TOKEN = -1


class Numbers(NamedTuple):
    """The settings of each row. `keys_N` are the seeds, hashed by `seed_key`; `drawn_N` counts the tokens before."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    keys_N: Tensor
    drawn_N: Tensor


class Penalties(NamedTuple):
    """Penalties of `rows_M`, the tokens that each of them has seen, and how often it generated each token."""

    rows_M: Tensor
    repetition_M: Tensor
    presence_M: Tensor
    frequency_M: Tensor
    seen_MV: Tensor
    counts_MV: Tensor


@dataclass(frozen=True)
class Form:
    """Whether any row draws (has a temperature), the largest top_k, and whether any row has a top_p or a min_p.

    `cut_M` are the rows that have a top_k or a top_p, for which the logits are sorted.
    """

    draws: bool = False
    top_k: int = 0
    by_top_p: bool = False
    by_min_p: bool = False
    cut_M: Tensor | None = None


def penalized(logits_NV: Tensor, penalties: Penalties) -> Tensor:
    """Returns the logits with repetition, presence and frequency penalties."""
    rows, repetition, presence, frequency, seen, counts = penalties
    logits = logits_NV[rows]
    repetition = repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    return logits_NV.index_copy(0, rows, logits)


def masked(logits_NV: Tensor, rows_M: Tensor, bits_MW: Tensor) -> Tensor:
    """Returns the logits with −∞ for tokens whose bit is 0. Bit i of word w stands for token 32 · w + i."""
    vocabulary = logits_NV.shape[1]
    places = torch.arange(32, device=bits_MW.device, dtype=torch.int32)
    allowed_MV = ((bits_MW[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary].bool()
    return logits_NV.index_copy(0, rows_M, logits_NV[rows_M].masked_fill(~allowed_MV, float("-inf")))


def choose(logits_NV: Tensor, numbers: Numbers, form: Form) -> Tensor:
    """Returns one token per row.

    Returns `NO_TOKEN` for a row whose logits contain NaN or +∞ or are all −∞; the caller must check for it.
    """
    if form.draws:
        draws_N1 = (numbers.temperature_N >= LEAST_TEMPERATURE)[:, None]
        temperature_N1 = torch.where(draws_N1, numbers.temperature_N[:, None], 1.0)
        drawn = cut(logits_NV / temperature_N1, numbers, form)
        drawn = drawn + noise(numbers.keys_N, numbers.drawn_N, logits_NV.shape[1])
        logits_NV = torch.where(draws_N1, drawn, logits_NV)
    tokens_N = logits_NV.argmax(dim=-1)
    # argmax treats NaN as the largest value, so checking the chosen logit is enough.
    largest_N = logits_NV.gather(1, tokens_N[:, None])[:, 0]
    return tokens_N.masked_fill(~largest_N.isfinite(), NO_TOKEN)


def cut(logits_NV: Tensor, numbers: Numbers, form: Form) -> Tensor:
    """Returns the logits with −∞ for tokens that top_k, top_p or min_p leave out."""
    if form.cut_M is not None:
        logits_NV = logits_NV.index_copy(0, form.cut_M, _cut_sorted(logits_NV[form.cut_M], numbers, form, form.cut_M))
    if form.by_min_p:
        least = logits_NV.amax(dim=-1, keepdim=True) + numbers.min_p_N.log()[:, None]
        logits_NV = logits_NV.masked_fill(logits_NV < least, float("-inf"))
    return logits_NV


def _cut_sorted(logits_MV: Tensor, numbers: Numbers, form: Form, rows_M: Tensor) -> Tensor:
    if form.top_k:
        count = min(form.top_k, logits_MV.shape[1])
        top_k_M1 = numbers.top_k_N[rows_M].long()[:, None]
        least = logits_MV.topk(count, dim=-1).values.gather(1, (top_k_M1 - 1).clamp(0, count - 1))
        logits_MV = logits_MV.masked_fill((logits_MV < least) & (top_k_M1 > 0), float("-inf"))
    if form.by_top_p:
        top_p_M1 = numbers.top_p_N[rows_M][:, None]
        ordered, order = logits_MV.sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(dim=-1)
        # Removes a token if all more likely tokens together reach top_p; the most likely token always stays.
        leaves = (shares.cumsum(dim=-1) - shares >= top_p_M1) & (top_p_M1 < 1)
        logits_MV = logits_MV.masked_fill(torch.zeros_like(leaves).scatter(1, order, leaves), float("-inf"))
    return logits_MV


def noise(keys_N: Tensor, drawn_N: Tensor, vocabulary: int) -> Tensor:
    """Returns Gumbel noise (N, V)."""
    place_N1 = mixed(keys_N + mixed(drawn_N))[:, None]
    bits = mixed(place_N1 + mixed(torch.arange(vocabulary, device=keys_N.device)))
    # Adding 0.5 keeps the value away from 0 and 1 in fp32, so that both logarithms are finite.
    uniform = ((bits >> 9).float() + 0.5) / 2**23
    return -(-uniform.log()).log()


def mixed(number: Tensor) -> Tensor:
    """Hashes 32-bit numbers (the finalizer of MurmurHash3) in int64, which gives the same result on every device."""
    number = number & _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)


def _mixed_number(number: int) -> int:
    number &= _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)


def seed_key(seed: int) -> int:
    """Returns the 32-bit number that stands for a seed."""
    return _mixed_number(_mixed_number(seed & _32_BITS) + ((seed >> 32) & _32_BITS))
