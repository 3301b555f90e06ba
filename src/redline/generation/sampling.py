"""Samples the next token on the device, with repetition penalty, temperature, top-k, top-p and min-p.

The values of the settings are tensors, so that a captured step can be reused when they change; only top_k and the set
of active settings (together: `form`) are fixed. The sampled token is the argmax of the logits plus Gumbel noise, which
needs no synchronization. The noise is a hash of the row's seed, the position and the token, so that a text does not
depend on the other rows, on CUDA graphs or on the device.

B: rows, V: vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import RedlineError

_32_BITS = 0xFFFFFFFF
# At lower temperatures, noise has no effect, and dividing the logits by the temperature could overflow fp32.
_LEAST_TEMPERATURE = 1e-20
# Returned in place of a token if the logits are not finite.
NO_TOKEN = -1


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Row r of a batch uses the seed `seed + r`.

    With a temperature of 0 (or below 1e-20), the most likely token is chosen. `top_k` is the number of most likely
    tokens to keep. `top_p` keeps the fewest most likely tokens whose probabilities add up to at least `top_p`. `min_p`
    keeps tokens whose probability is at least `min_p` times the highest one. A `repetition_penalty` above 1 makes
    tokens less likely if they have occurred before, including in the prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RedlineError(f"temperature must be at least 0, not {self.temperature}.")
        if self.top_k < 0:
            raise RedlineError(f"top_k must be 0 (off) or more, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise RedlineError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise RedlineError(f"min_p must be from 0 to 1, not {self.min_p}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise RedlineError(f"repetition_penalty must be above 0, not {self.repetition_penalty}.")
        if not 0 <= self.seed < 2**63:
            raise RedlineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}.")

    @property
    def form(self) -> tuple[bool, int, bool, bool, bool]:
        """The settings that a captured step depends on; all others may change between replays."""
        draws = self.temperature >= _LEAST_TEMPERATURE
        top_k = self.top_k if draws else 0
        return draws, top_k, draws and self.top_p < 1, draws and self.min_p > 0, self.repetition_penalty != 1


class Sampler:
    """Stores the settings as tensors, and the position and the seen tokens of each row.

    Samples only among the first `vocabulary` tokens; the logits may cover more.
    """

    def __init__(self, sampling: Sampling, batch: int, vocabulary: int, device: torch.device) -> None:
        self.draws, self.top_k, self.by_top_p, self.by_min_p, self.penalizes = sampling.form
        self.top_k = min(self.top_k, vocabulary)
        self.numbers = torch.empty(4, device=device)
        self.keys_B = torch.empty(batch, dtype=torch.int64, device=device)
        self.drawn_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens_V = torch.arange(vocabulary, device=device)
        seen = vocabulary if self.penalizes else 0
        self.seen_BV = torch.zeros((batch, seen), dtype=torch.bool, device=device)
        self.start(sampling)

    def start(self, sampling: Sampling) -> None:
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
