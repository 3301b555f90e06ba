"""Samples one token per row of logits on the device, each row with its own settings.

The settings are tensors with one number per row. `Form` says which settings are used by any row, so that the work for
unused settings is skipped. A row's token does not depend on the other rows. The sampled token is the argmax of the
logits plus Gumbel noise, which needs no synchronization. The noise is a hash of the row's seed, the position and
the token, so that a text depends neither on CUDA graphs nor on the device.

N: rows, V: vocabulary, M: rows that use a setting.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.ops.sample import sample

_32_BITS = 0xFFFFFFFF
# At lower temperatures, noise has no effect, and dividing the logits by the temperature could overflow fp32.
LEAST_TEMPERATURE = 1e-20
# Returned in place of a token if the logits are not finite.
NO_TOKEN = -1


class Numbers(NamedTuple):
    """The settings of each row. `keys_N` are the seeds, hashed by `seed_key`; `drawn_N` counts earlier tokens."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    keys_N: Tensor
    drawn_N: Tensor


class Penalties(NamedTuple):
    """The penalties of the rows `rows_M`, the tokens that each row contains, and how often it generated each token."""

    rows_M: Tensor
    repetition_M: Tensor
    presence_M: Tensor
    frequency_M: Tensor
    seen_MV: Tensor
    counts_MV: Tensor


@dataclass(frozen=True)
class Form:
    """The settings that rows with a temperature use: the largest top_k, and whether any has a top_p or a min_p.

    `cut_M` are the rows that have a top_k or a top_p: only their logits are searched or sorted.
    """

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
    temperature_N = numbers.temperature_N
    if form.cut_M is not None or form.by_min_p:
        draws_N1 = (temperature_N > 0)[:, None]
        logits_NV = logits_NV.float()
        scaled_NV = logits_NV / torch.where(draws_N1, temperature_N[:, None], 1.0)
        logits_NV = torch.where(draws_N1, cut(scaled_NV, numbers, form), logits_NV)
        temperature_N = (temperature_N > 0).float()
    return sample(logits_NV, temperature_N, numbers.keys_N, numbers.drawn_N)


def cut(logits_NV: Tensor, numbers: Numbers, form: Form) -> Tensor:
    """Returns the logits with −∞ for tokens that top_k, top_p or min_p exclude."""
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


def _mixed_number(number: int) -> int:
    number &= _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)


def seed_key(seed: int) -> int:
    """Returns a 32-bit hash of a seed, as `sample` needs it."""
    return _mixed_number(_mixed_number(seed & _32_BITS) + ((seed >> 32) & _32_BITS))
