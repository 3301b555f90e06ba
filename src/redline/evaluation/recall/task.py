"""The interface of a recall task, and the accuracy of a model on a sample."""

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

# The target of positions that are not queried.
IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """Tokens and targets, both (B, S). The target of a queried position is the token that should come next."""

    tokens_BS: Tensor
    targets_BS: Tensor

    def to(self, device: torch.device | str) -> "Sample":
        return Sample(self.tokens_BS.to(device), self.targets_BS.to(device))


class Recall(Protocol):
    """A task that generates new samples of any length, determined by the state of the generator. It is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def vocabulary(self) -> int: ...

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample: ...


def accuracy(predict: Callable[[Tensor], Tensor], sample: Sample) -> float:
    """Returns the share of queried tokens that are predicted correctly; `predict` returns logits (B, S, V)."""
    asked = sample.targets_BS != IGNORED
    with torch.no_grad():
        logits = predict(sample.tokens_BS)
    if not torch.isfinite(logits).all():
        return 0.0
    right = logits[asked].argmax(-1) == sample.targets_BS[asked]
    return right.float().mean().item()
