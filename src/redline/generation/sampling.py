"""From logits to the next token, on the device: penalties, temperature, what is left to choose from, and the draw.

The settings' numbers are tensors, so that a recorded step follows when they change; only which of them are in use is
fixed (`form`). The draw adds Gumbel noise and takes the largest, which needs no sum and no waiting. The noise is a hash
of the row's seed, the position and the token, so that a text depends on its seed alone: not on the other rows, not on
graphs, not on the device.

B: rows, V: vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import RedlineError

_32_BITS = 0xFFFFFFFF
# Below it the noise changes nothing, and logits divided by it could leave fp32.
_LEAST_TEMPERATURE = 1e-20
# In place of a token where logits are not finite.
NO_TOKEN = -1


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token, as does one below 1e-20; row r of a batch draws with `seed + r`.

    `top_k` keeps that many tokens, `top_p` the likeliest that together have this probability, `min_p` those at least
    this share as likely as the likeliest. `repetition_penalty` above 1 makes tokens less likely that came before, in
    the prompt too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RedlineError(f"the temperature is 0 or more, not {self.temperature}.")
        if self.top_k < 0:
            raise RedlineError(f"top-k is 0 (off) or more, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise RedlineError(f"top-p is above 0 and at most 1, not {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise RedlineError(f"min-p is between 0 and 1, not {self.min_p}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise RedlineError(f"the repetition penalty is above 0, not {self.repetition_penalty}.")
        if not 0 <= self.seed < 2**63:
            raise RedlineError(f"a seed is a whole number from 0 to 2^63 − 1, not {self.seed}.")

    @property
    def form(self) -> tuple[bool, int, bool, bool, bool]:
        """What a recorded step is made for; everything else may change between replays."""
        draws = self.temperature >= _LEAST_TEMPERATURE
        top_k = self.top_k if draws else 0
        return draws, top_k, draws and self.top_p < 1, draws and self.min_p > 0, self.repetition_penalty != 1


class Sampler:
    """The settings as tensors on a device, and the state of the draw: positions, and tokens seen.

    Only the first `vocabulary` tokens are drawn; logits may have more.
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
        """Begins new texts with settings of the same form."""
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        self.numbers.copy_(torch.tensor(numbers))
        seeds = torch.tensor([_wrapped(sampling.seed + row) for row in range(len(self.keys_B))])
        self.keys_B.copy_(mixed(mixed(seeds & _32_BITS) + ((seeds >> 32) & _32_BITS)))
        self.drawn_B.zero_()
        self.seen_BV.zero_()

    def notice(self, tokens_BS: Tensor, counts_B: Tensor) -> None:
        """Remembers tokens of the prompt, the first `counts_B` of each row."""
        if self.penalizes:
            valid = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < counts_B[:, None]
            # Padding repeats a row's first token, which is seen anyway; a row of nothing else notes what it had.
            first = tokens_BS[:, :1].expand_as(tokens_BS)
            noted = self.seen_BV.gather(1, first) | (counts_B > 0)[:, None]
            self.seen_BV.scatter_(1, torch.where(valid, tokens_BS, first), noted)

    def next_tokens(self, logits_BV: Tensor) -> Tensor:
        """One token a row; counts it as drawn and as seen.

        `NO_TOKEN` for a row with a NaN, with +∞, or with nothing above −∞: who reads the tokens must look.
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
        # A NaN counts as the largest, so the largest tells of the whole row.
        largest_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
        return tokens_B.masked_fill(~largest_B.isfinite(), NO_TOKEN)

    def _cut(self, logits_BV: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        if self.top_k:
            least = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
        if self.by_top_p:
            ordered, order = logits_BV.sort(dim=-1, descending=True, stable=True)
            shares = ordered.softmax(dim=-1)
            # A token stays when those before it do not reach the share yet; the first always does.
            leaves = shares.cumsum(dim=-1) - shares >= top_p
            logits_BV = logits_BV.masked_fill(torch.zeros_like(leaves).scatter(1, order, leaves), float("-inf"))
        if self.by_min_p:
            least = logits_BV.amax(dim=-1, keepdim=True) + min_p.log()
            logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
        return logits_BV

    def _noise(self) -> Tensor:
        place_B1 = mixed(self.keys_B + mixed(self.drawn_B))[:, None]
        bits = mixed(place_B1 + mixed(self.tokens_V))
        # 23 bits and a half: neither 0 nor 1 in fp32, so both logarithms are finite.
        uniform = ((bits >> 9).float() + 0.5) / 2**23
        return -(-uniform.log()).log()


def mixed(number: Tensor) -> Tensor:
    """32 bits well stirred (MurmurHash3's last step), in 64-bit integers, which every device multiplies alike."""
    number = number & _32_BITS
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _32_BITS
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _32_BITS
    return number ^ (number >> 16)


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
