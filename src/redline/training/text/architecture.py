"""What a model is to the training of text: an entry in `architectures.py`, and nothing of it in the loop.

An entry is a frozen dataclass. Its fields are the settings under [model]; its methods say how to build the model, what
its loss of a batch is, how much arithmetic a token takes, and how the result is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.nn.packing import Packing

# Products are fastest on whole tiles, and what is read of a vocabulary does not change when it is rounded up.
_VOCABULARY_STEP = 64
# What is more is a slip, and even counting it would take for ever.
_MOST_LAYERS = 2**14


@dataclass(frozen=True)
class Architecture(ABC):
    """`vocabulary` follows from the tokenizer when it is 0."""

    vocabulary: int = 0

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The most tokens of a row, where there is such a limit."""

    @abstractmethod
    def build(self, vocabulary: int) -> nn.Module: ...

    def parameters(self, vocabulary: int) -> int:
        """How many weights `build` makes, without their memory."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in self.build(vocabulary).parameters())

    @property
    def kept_per_token(self) -> int:
        """Numbers of a token that the backward pass needs at least; 0 when nobody has counted."""
        return 0

    @abstractmethod
    def loss(
        self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float
    ) -> Tensor: ...

    def before_step(self, model: nn.Module, step: int) -> None:
        """For a model whose loss changes as it learns: it keeps what the step calls for in itself."""
        return

    def penalties(self, step: int) -> tuple[str, ...]:
        """What the model itself adds to the cross-entropy of that step, in words."""
        return ()

    @abstractmethod
    def flops_per_token(self, model: nn.Module, length: float) -> float:
        """Forward and backward, of the products alone; what is computed a second time to save memory counts once.

        `length` is the mean of what a token attends in: its document, where rows hold several.
        """

    @abstractmethod
    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        """Weights and config, in the layout that the model's loader reads.

        `end` is the token that ends a document, where there is one; `about` goes into config.json as well.
        """

    def vocabulary_for(self, tokens: int) -> int:
        """The rows of the embedding for a tokenizer with so many tokens."""
        if self.vocabulary and self.vocabulary < tokens:
            raise RedlineError(
                f"the vocabularies do not match: the tokenizer has {tokens:,} tokens, and the model's vocabulary under "
                f"[model] is {self.vocabulary:,}."
            )
        return self.vocabulary or -(-tokens // _VOCABULARY_STEP) * _VOCABULARY_STEP


def check_layers(layers: int) -> None:
    if layers > _MOST_LAYERS:
        raise RedlineError(f"layers = {layers:,} under [model] are too many: {_MOST_LAYERS:,} are the most.")


def kept_by_blocks(layers: int, width: int, mlp_width: int) -> int:
    """Of each block: the two inputs of its halves, query and attention's output; gate and value of the feed-forward."""
    return layers * (4 * width + 2 * mlp_width)


def products_per_token(model: nn.Module) -> int:
    """Multiplications of a token with weights in one forward pass: every matrix once, but for a mere lookup."""
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim == 2}
    used = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - used
    return sum(size for name, size in matrices.items() if name not in looked_up)
