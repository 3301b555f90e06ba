"""`gpt` and `gpt_124m`: training steps (forward, backward, AdamW) of a GPT, small enough for a CPU and GPT-2
sized.

Tokens are drawn as words are in real text, a few often and most rarely (Zipf's law). So there is something
to learn from the first step on, and an optimizer that does nothing shows in the loss after a few steps; on
uniform tokens the loss would stay where it is whether the optimizer works or not.

What the limits mean: gradients in bf16 are off by less than 1% on a tiny GPT, without the causal mask by
more than 20%; a loss that the optimizer does not bring down is 4% too high after one step. The limit on
gradients is 5%, on the loss of any judged step 1%.
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

_NO_TARGET = -100  # what cross_entropy ignores


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
    """Cross-entropy of each token's successor; the last has none (masked, so the logits are not copied)."""
    targets = F.pad(batch["tokens"][:, 1:], (0, 1), value=_NO_TARGET)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NO_TARGET)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _zipf_tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """The k-th most frequent token appears in proportion to 1/k."""
    rank = torch.rand(batch, length).mul(math.log(vocabulary)).exp()
    return rank.long().clamp(1, vocabulary) - 1
