"""The interface between a model and training on text; `architectures.py` has the implementations.

The fields of an architecture are the keys under [model]. Its methods build the model, compute the loss of a batch,
count the FLOP per token and save the result. The training loop knows nothing else about the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from redline.errors import RedlineError
from redline.files.limits import NonNegativeInt
from redline.machine.meta import meta_device
from redline.nn.packing import Packing

# The vocabulary is rounded up to a multiple of this, because matrix products are fastest on whole tiles.
_VOCABULARY_STEP = 64
# A larger number is assumed to be a typo; building the model to count its parameters would take minutes.
_MOST_LAYERS = 2**14


@dataclass(frozen=True)
class Architecture(ABC):
    """The settings of a model. `vocabulary` = 0 stands for the size of the tokenizer's vocabulary, rounded up."""

    vocabulary: NonNegativeInt = 0

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The largest number of tokens in a row; None if the model has no such limit."""

    @abstractmethod
    def build(self, vocabulary: int) -> nn.Module: ...

    def parameters(self, vocabulary: int) -> int:
        """Returns the number of parameters that `build` creates, without allocating them."""
        with meta_device():
            return sum(weight.numel() for weight in self.build(vocabulary).parameters())

    @property
    def kept_per_token(self) -> int:
        """A lower bound on the number of activations per token that the backward pass needs; 0 if unknown."""
        return 0

    @abstractmethod
    def loss(
        self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float
    ) -> Tensor: ...

    def before_step(self, model: nn.Module, step: int) -> None:
        """Prepares a model whose loss depends on the step."""
        return

    def penalties(self, step: int) -> tuple[str, ...]:
        """Returns the names of the terms that the model adds to the cross-entropy at this step."""
        return ()

    @abstractmethod
    def flops_per_token(self, model: nn.Module, length: float) -> float:
        """Returns the FLOP of the forward and backward matrix products; activation recomputation is not counted.

        `length` is the mean length of a token's row, or of its document if rows are packed.
        """

    @abstractmethod
    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        """Writes weights and config in the layout that the model's loader reads.

        `end` is the token that ends a document, if there is one; `about` is added to config.json.
        """

    def vocabulary_for(self, tokens: int) -> int:
        """Returns the number of embedding rows for a tokenizer with this many tokens."""
        if self.vocabulary and self.vocabulary < tokens:
            raise RedlineError(
                f"the vocabularies do not match: the tokenizer has {tokens:,} tokens, and the model's vocabulary under "
                f"[model] is {self.vocabulary:,}."
            )
        return self.vocabulary or -(-tokens // _VOCABULARY_STEP) * _VOCABULARY_STEP


class LossModule(nn.Module):
    """Computes the training loss from plain tensors, so that rungs can wrap and compile it."""

    def __init__(self, architecture: Architecture, model: nn.Module, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self._architecture = architecture

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor, positions_BS: Tensor, borders: Tensor
    ) -> Tensor:
        packing = Packing(documents_BS, positions_BS, borders)
        # The validation loss excludes the z-loss.
        z_loss = self.z_loss if self.training else 0.0
        return self._architecture.loss(self.model, tokens_BS, targets_BS, packing, z_loss)


def own_loss(output: Tensor, _batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of a `LossModule`, which is the loss."""
    return output


def check_layers(layers: int) -> None:
    if layers > _MOST_LAYERS:
        raise RedlineError(f"layers = {layers:,} under [model] is too large: the limit is {_MOST_LAYERS:,}.")


def kept_by_blocks(layers: int, width: int, mlp_width: int) -> int:
    """Returns the number of activations per token that all blocks keep for the backward pass.

    Each block keeps the inputs of attention and MLP, the query, the attention output, and the MLP's gate and value.
    """
    return layers * (4 * width + 2 * mlp_width)


def products_per_token(model: nn.Module) -> int:
    """Returns the multiplications per token in one forward pass: the sizes of all matrices except embedding tables."""
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim == 2}
    used = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - used
    return sum(size for name, size in matrices.items() if name not in looked_up)
