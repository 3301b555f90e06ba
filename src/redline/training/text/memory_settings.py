"""A decoder with long-term memory as something to train on text."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.models.memory import TitanConfig, TitanModel, save_memory_model
from redline.nn.packing import Packing
from redline.training.text.architecture import Architecture, check_layers, kept_by_blocks, products_per_token

# Settings of the training, not of the model.
_TRAINING = ("vocabulary", "score_weight", "score_after")
_OF_THE_BANK = ("memory_compression_ratio", "use_adaptive_compression", "merge_cosine", "score_weight", "score_after")


@dataclass(frozen=True)
class MemorySettings(Architecture):
    """`score_weight` is what it costs to want every token kept, from step `score_after` on; 0s stand for defaults."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    key_value_heads: int = 0
    mlp_width: int = 0
    attention_every: int = 4
    memory_update: str = "gated_delta"
    memory_heads: int = 0
    memory_key_dim: int = 0
    memory_value_dim: int = 0
    memory_chunk: int = 64
    convolution: int = 4
    segment: int = 128
    window_segments: int = 1
    memory_slots: int = 0
    memory_compression_ratio: float = 0.25
    use_adaptive_compression: bool = False
    merge_cosine: float = 0.98
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    score_weight: float = 0.1
    score_after: int = 300

    def __post_init__(self) -> None:
        check_layers(self.layers)
        config = self.config(self.vocabulary or 1)
        for name in ("score_weight", "score_after"):
            if getattr(self, name) < 0:
                raise RedlineError(f"{name} under [model] cannot be {getattr(self, name)}.")
        if not -1 <= self.merge_cosine <= 1:
            raise RedlineError(f"merge_cosine under [model] is a cosine, from -1 to 1, not {self.merge_cosine}.")
        if self.memory_slots and not any(map(config.is_attention, range(self.layers))):
            raise RedlineError(
                f"memory_slots are for layers of attention, and with attention_every = {self.attention_every} and "
                f"layers = {self.layers} there is none: lower attention_every, or leave the slots out."
            )
        chosen = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if not self.memory_slots and (idle := [name for name in _OF_THE_BANK if name in chosen]):
            raise RedlineError(f"{idle[0]} under [model] is for a bank of slots: give memory_slots, or leave it out.")

    @property
    def limit(self) -> int | None:
        return None

    def config(self, vocabulary: int) -> TitanConfig:
        chosen: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _TRAINING}
        return TitanConfig(vocabulary=vocabulary, **chosen)

    def build(self, vocabulary: int) -> nn.Module:
        return TitanModel(self.config(vocabulary))

    def parameters(self, vocabulary: int) -> int:
        """Every layer is of one of two kinds, so that two models of two layers tell the size of any."""
        attending = self.layers // self.attention_every if self.attention_every else 0

        def count(layers: int, attention_every: int) -> int:
            few = replace(self.config(vocabulary), layers=layers, attention_every=attention_every)
            return sum(weight.numel() for weight in TitanModel(few).parameters())

        try:
            with torch.device("meta"):
                neural, attention = (count(2, every) - count(1, every) for every in (0, 1))
                outside = count(1, 0) - neural
        except (RuntimeError, TypeError, OverflowError) as error:
            # Beyond 64 bits not even a shape can be made.
            raise RedlineError("[model] has sizes that no model can have.") from error
        return outside + attending * attention + (self.layers - attending) * neural

    @property
    def kept_per_token(self) -> int:
        return kept_by_blocks(self.layers, self.width, self.config(1).feed_forward_width)

    def loss(self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float) -> Tensor:
        assert isinstance(model, TitanModel)
        # Rows of one document each need none of what keeps documents apart.
        documents_BS = None if packing.is_whole else packing.documents_BS
        return model.loss(tokens_BS, targets_BS, documents_BS, z_loss=z_loss)

    def before_step(self, model: nn.Module, step: int) -> None:
        assert isinstance(model, TitanModel)
        model.score_weight = self.score_weight if step >= self.score_after else 0.0

    def penalties(self, step: int) -> tuple[str, ...]:
        return ("score penalty",) if self.memory_slots and self.score_weight and step >= self.score_after else ()

    def flops_per_token(self, model: nn.Module, length: float) -> float:
        config = self.config(1)
        attending = sum(config.is_attention(layer) for layer in range(self.layers))
        seen = length / 2 if self.memory_slots else min(length / 2, config.span)
        # Read, correct and write a matrix; and the tokens of a chunk among each other.
        matrix = 3 * config.key_dim * config.value_dim + self.memory_chunk * (config.key_dim + config.value_dim)
        remembering = (self.layers - attending) * config.neural_heads * matrix
        return 6.0 * (products_per_token(model) + 2 * attending * seen * self.width + remembering)

    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        assert isinstance(model, TitanModel)
        save_memory_model(model, folder, {**({} if end is None else {"eos_token_id": end}), **(about or {})})
