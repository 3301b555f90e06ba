"""The settings of a decoder with long-term neural memory trained on text."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.models.memory import TitanConfig, TitanModel, save_memory_model
from redline.nn.meta import meta_device
from redline.nn.packing import Packing
from redline.training.settings import NonNegativeFloat, NonNegativeInt
from redline.training.text.architecture import Architecture, check_layers, kept_by_blocks, products_per_token

# Settings of the training that are not part of the model's config.
_TRAINING_KEYS = ("vocabulary", "score_weight", "score_after")
_SLOT_KEYS = ("memory_compression_ratio", "use_adaptive_compression", "merge_cosine", "score_weight", "score_after")


@dataclass(frozen=True)
class MemorySettings(Architecture):
    """`score_weight` is the weight of the penalty on token scores, applied from step `score_after` on.

    For `key_value_heads`, `mlp_width` and the sizes of the neural memory, 0 stands for the default.
    """

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
    merge_cosine: Annotated[float, Meta(ge=-1, le=1)] = 0.98
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    score_weight: NonNegativeFloat = 0.1
    score_after: NonNegativeInt = 300

    def __post_init__(self) -> None:
        check_layers(self.layers)
        config = self.config(self.vocabulary or 1)
        if self.memory_slots and not any(map(config.is_attention, range(self.layers))):
            raise RedlineError(
                f"memory_slots under [model] need a layer of attention, and attention_every = {self.attention_every} "
                f"with layers = {self.layers} gives none: lower attention_every, or remove memory_slots."
            )
        defaults = {field.name: field.default for field in fields(self)}
        changed = [name for name in _SLOT_KEYS if getattr(self, name) != defaults[name]]
        if changed and not self.memory_slots:
            raise RedlineError(f"{changed[0]} under [model] needs memory_slots: set memory_slots, or remove it.")

    @property
    def limit(self) -> int | None:
        return None

    def config(self, vocabulary: int) -> TitanConfig:
        chosen = {name: value for name, value in asdict(self).items() if name not in _TRAINING_KEYS}
        return TitanConfig(vocabulary=vocabulary, **chosen)

    def build(self, vocabulary: int) -> nn.Module:
        return TitanModel(self.config(vocabulary))

    def parameters(self, vocabulary: int) -> int:
        """Computes the count from models of one and two layers, because there are only two kinds of layers."""
        attending = self.layers // self.attention_every if self.attention_every else 0

        def count(layers: int, attention_every: int) -> int:
            few = replace(self.config(vocabulary), layers=layers, attention_every=attention_every)
            return sum(weight.numel() for weight in TitanModel(few).parameters())

        try:
            with meta_device():
                neural, attention = (count(2, every) - count(1, every) for every in (0, 1))
                outside = count(1, 0) - neural
        except (RuntimeError, TypeError, OverflowError) as error:
            # Sizes beyond 64 bits fail even on the meta device.
            raise RedlineError("the sizes under [model] are too large: lower width, layers or heads.") from error
        return outside + attending * attention + (self.layers - attending) * neural

    @property
    def kept_per_token(self) -> int:
        return kept_by_blocks(self.layers, self.width, self.config(1).feed_forward_width)

    def loss(self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float) -> Tensor:
        assert isinstance(model, TitanModel)
        # Rows with one document each need no document mask.
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
        # Per token: read, correct and write the memory matrix, and attend to the other tokens of the chunk.
        matrix = 3 * config.key_dim * config.value_dim + self.memory_chunk * (config.key_dim + config.value_dim)
        remembering = (self.layers - attending) * config.neural_heads * matrix
        return 6.0 * (products_per_token(model) + 2 * attending * seen * self.width + remembering)

    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        assert isinstance(model, TitanModel)
        save_memory_model(model, folder, {**({} if end is None else {"eos_token_id": end}), **(about or {})})
