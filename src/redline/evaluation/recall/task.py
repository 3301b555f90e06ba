"""What a recall task is, and how often a model gets it right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# A target that nobody is asked for.
IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """Tokens (B, S), and beside each the token that should come next, where that is asked."""

    tokens_BS: Tensor
    targets_BS: Tensor

    def to(self, device: torch.device | str) -> "Sample":
        return Sample(self.tokens_BS.to(device), self.targets_BS.to(device))


class Recall(Protocol):
    """A task with fresh samples of any length; the same generator state gives the same ones."""

    @property
    def vocabulary(self) -> int: ...

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample: ...


def accuracy(predict: Callable[[Tensor], Tensor], sample: Sample) -> float:
    """The share of asked tokens whose most likely answer is the right one; `predict` gives logits (B, S, V)."""
    asked = sample.targets_BS != IGNORED
    with torch.no_grad():
        logits = predict(sample.tokens_BS)
    if not torch.isfinite(logits).all():
        return 0.0
    right = logits[asked].argmax(-1) == sample.targets_BS[asked]
    return right.float().mean().item()
