"""Samples the next token on the device, with repetition penalty, temperature, top-k, top-p and min-p.

The values of the settings are tensors, so that a captured step can be reused when they change; only top_k and the set
of active settings (together: `form`) are fixed. The sampled token is the argmax of the logits plus Gumbel noise, which
needs no synchronization. The noise is a hash of the row's seed, the position and the token, so that a text does not
depend on the other rows, on CUDA graphs or on the device.

B: rows, V: vocabulary.
"""

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.generation.request import SamplingOptions
from redline.generation.sampling import LEAST_TEMPERATURE, NO_TOKEN

_32_BITS = 0xFFFFFFFF


def form_of(sampling: SamplingOptions) -> tuple[bool, int, bool, bool, bool]:
    """Returns the settings that a captured step depends on; all others may change between replays."""
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias:
        raise RedlineError("one batch at a time supports neither presence_penalty, frequency_penalty nor logit_bias.")
    draws = sampling.temperature >= LEAST_TEMPERATURE
    top_k = sampling.top_k if draws else 0
    return draws, top_k, draws and sampling.top_p < 1, draws and sampling.min_p > 0, sampling.repetition_penalty != 1


class Sampler:
    """Stores the settings as tensors, and the position and the seen tokens of each row.

    Samples only among the first `vocabulary` tokens; the logits may cover more.
    """

    def __init__(self, sampling: SamplingOptions, batch: int, vocabulary: int, device: torch.device) -> None:
        self.draws, self.top_k, self.by_top_p, self.by_min_p, self.penalizes = form_of(sampling)
        self.top_k = min(self.top_k, vocabulary)
        self.numbers = torch.empty(4, device=device)
        self.keys_B = torch.empty(batch, dtype=torch.int64, device=device)
        self.drawn_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens_V = torch.arange(vocabulary, device=device)
        seen = vocabulary if self.penalizes else 0
        self.seen_BV = torch.zeros((batch, seen), dtype=torch.bool, device=device)
        self.start(sampling)

    def start(self, sampling: SamplingOptions) -> None:
        """Starts new texts. The `form` of the settings must be that of the settings given to `__init__`."""
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        self.numbers.copy_(torch.tensor(numbers))
        seeds = torch.tensor([(sampling.seed + row + 2**63) % 2**64 - 2**63 for row in range(len(self.keys_B))])
        self.keys_B.copy_(mixed(mixed(seeds & _32_BITS) + ((seeds >> 32) & _32_BITS)))
        self.drawn_B.zero_()
        self.seen_BV.zero_()

    def notice(self, tokens_BS: Tensor, counts_B: Tensor) -> None:
        """Marks the first `counts_B` tokens of each row of a prompt as seen."""
        if self.penalizes:
            valid = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < counts_B[:, None]
            # Padding is replaced by the row's first token, which is marked anyway; a row with count 0 stays unchanged.
            first = tokens_BS[:, :1].expand_as(tokens_BS)
            noted = self.seen_BV.gather(1, first) | (counts_B > 0)[:, None]
            self.seen_BV.scatter_(1, torch.where(valid, tokens_BS, first), noted)

    def next_tokens(self, logits_BV: Tensor) -> Tensor:
        """Returns one token per row, and marks it as seen.

        Returns `NO_TOKEN` for a row whose logits contain NaN or +∞ or are all −∞; the caller must check for it.
        """
        logits_BV = logits_BV[:, : len(self.tokens_V)].float()
        temperature, top_p, min_p, penalty = self.numbers.unbind()
        if self.penalizes:
            penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
            logits_BV = torch.where(self.seen_BV, penalized, logits_BV)
        if self.draws:
            logits_BV = self._cut(logits_BV / temperature, top_p, min_p) + self._noise()
        tokens_B = logits_BV.argmax(dim=-1)
        self.drawn_B += 1
        if self.penalizes:
            self.seen_BV.scatter_(1, tokens_B[:, None], True)
        # argmax treats NaN as the largest value, so checking the chosen logit is enough.
        largest_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
        return tokens_B.masked_fill(~largest_B.isfinite(), NO_TOKEN)

    def _cut(self, logits_BV: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        if self.top_k:
            least = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
        if self.by_top_p:
            ordered, order = logits_BV.sort(dim=-1, descending=True, stable=True)
            shares = ordered.softmax(dim=-1)
            # Removes a token if all more likely tokens together reach top_p; the most likely token always stays.
            leaves = shares.cumsum(dim=-1) - shares >= top_p
            logits_BV = logits_BV.masked_fill(torch.zeros_like(leaves).scatter(1, order, leaves), float("-inf"))
        if self.by_min_p:
            least = logits_BV.amax(dim=-1, keepdim=True) + min_p.log()
            logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
        return logits_BV

    def _noise(self) -> Tensor:
        place_B1 = mixed(self.keys_B + mixed(self.drawn_B))[:, None]
        bits = mixed(place_B1 + mixed(self.tokens_V))
        # Adding 0.5 keeps the value away from 0 and 1 in fp32, so that both logarithms are finite.
        uniform = ((bits >> 9).float() + 0.5) / 2**23
        return -(-uniform.log()).log()


def mixed(number: Tensor) -> Tensor:
    """Hashes 32-bit numbers (the finalizer of MurmurHash3) in int64, which gives the same result on every device."""
    number = number & _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)
