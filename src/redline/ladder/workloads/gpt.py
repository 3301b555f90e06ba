"""`gpt` and `gpt_124m`: training steps (forward, backward, AdamW) of a small GPT and of one the size of GPT-2.

Token frequencies follow Zipf's law, as in real text. So the loss falls from the first step, and an optimizer that does
nothing is detected within a few steps. With uniformly sampled tokens no optimizer could reduce the loss.

How the limits were chosen: on a tiny GPT, bf16 gradients have an error below 1%, and gradients without the causal mask
above 20%; without optimizer steps the loss is 4% too high after one step. The limits are 5% for gradients and 1% for
the loss of every judged step.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.models.gpt import GPT

_NO_TARGET = -100  # ignored by cross_entropy


def gpt(
    batch: int = 4,
    length: int = 128,
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    vocabulary: int = 4096,
) -> Workload:
    """A training step of a GPT on `batch` × `length` tokens; the default has 4.2M parameters."""
    return Workload(
        build=lambda: GPT(vocabulary, length, width, depth, heads),
        inputs=lambda seed: {"tokens": _zipf_tokens(batch, length, vocabulary)},
        loss=next_token_loss,
        optimizer=adamw,
        gates=(Gate("loss_difference", 0.01), Gate("gradient_difference", 0.05)),
        items=batch * length,
        unit="token",
    )


def gpt_124m(batch: int = 16, length: int = 1024) -> Workload:
    """A training step of a model of GPT-2's size: 124M parameters."""
    return gpt(batch, length, width=768, depth=12, heads=12, vocabulary=50304)


def next_token_loss(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """Returns the cross-entropy of the next token; masks the last position, because slicing would copy the logits."""
    targets = F.pad(batch["tokens"][:, 1:], (0, 1), value=_NO_TARGET)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NO_TARGET)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _zipf_tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Samples tokens such that the frequency of the k-th most frequent token is proportional to 1/k."""
    rank = torch.rand(batch, length).mul(math.log(vocabulary)).exp()
    return rank.long().clamp(1, vocabulary) - 1
