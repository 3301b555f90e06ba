"""The settings of the models that can be trained on text: a Llama-shaped decoder, and one with long-term memory."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.limits import NonNegativeFloat, NonNegativeInt
from redline.machine.meta import meta_device
from redline.models.decoder import Decoder, DecoderConfig, save_decoder
from redline.models.decoder.checkpoint import read_json
from redline.models.decoder.hugging_face import family_of
from redline.models.memory import TitanConfig, TitanModel, save_memory_model
from redline.nn.packing import Packing
from redline.training.text.architecture import Architecture, check_layers, kept_by_blocks, products_per_token

_SLOT_KEYS = ("memory_compression_ratio", "use_adaptive_compression", "merge_cosine", "score_weight", "score_after")


@dataclass(frozen=True)
class DecoderSettings(Architecture):
    """A Llama-shaped decoder; `window` is the length of the attention window, 0 for full attention."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    key_value_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 2048
    context: int = 2048
    window: NonNegativeInt = 0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    query_key_norm: bool = False
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        check_layers(self.layers)
        # Raises for a model that no Hugging Face architecture can express: it could be trained, but not saved.
        family_of(self.config(self.vocabulary or 1))

    @property
    def limit(self) -> int | None:
        return self.context

    def config(self, vocabulary: int) -> DecoderConfig:
        chosen = {name: value for name, value in asdict(self).items() if name not in ("vocabulary", "window")}
        return DecoderConfig(vocabulary, windows=(self.window or None,) * self.layers, **chosen)

    def build(self, vocabulary: int) -> nn.Module:
        return Decoder(self.config(vocabulary))

    def parameters(self, vocabulary: int) -> int:
        return self.config(vocabulary).parameters

    @property
    def kept_per_token(self) -> int:
        return kept_by_blocks(self.layers, self.width, self.mlp_width)

    def loss(self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float) -> Tensor:
        assert isinstance(model, Decoder)
        return model.loss(tokens_BS, targets_BS, packing, z_loss=z_loss)

    def flops_per_token(self, model: nn.Module, length: float) -> float:
        # The backward pass computes two matrix products per forward product. A token attends to half of its document on
        # average.
        seen = min(length, 2 * self.window) if self.window else length
        channels = self.config(1).heads * self.config(1).head_dim
        return 6.0 * products_per_token(model) + 6.0 * self.layers * seen * channels

    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        assert isinstance(model, Decoder)
        save_decoder(model, folder, stop_tokens=() if end is None else (end,))
        if about:
            config = {**read_json(folder / "config.json"), **about}
            write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True)
class MemorySettings(Architecture, TitanConfig):
    """The hyper-parameters of the model and of its training.

    `score_weight` is the weight of the penalty on token scores, applied from step `score_after` on. For
    `key_value_heads`, `mlp_width` and the sizes of the neural memory, 0 stands for the default.
    """

    width: int = 768
    layers: int = 12
    heads: int = 12
    merge_cosine: Annotated[float, Meta(ge=-1, le=1)] = 0.98
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
        own = {field.name: getattr(self, field.name) for field in fields(TitanConfig)}
        own["vocabulary"] = vocabulary
        return TitanConfig(**own)

    def build(self, vocabulary: int) -> nn.Module:
        return TitanModel(self.config(vocabulary))

    def parameters(self, vocabulary: int) -> int:
        """Returns the number of parameters, extrapolated from models with one and two layers of each kind."""
        attending = self.layers // self.attention_every if self.attention_every else 0

        def count(layers: int, attention_every: int) -> int:
            few = replace(self.config(vocabulary), layers=layers, attention_every=attention_every)
            return sum(weight.numel() for weight in TitanModel(few).parameters())

        try:
            with meta_device():
                neural, attention = (count(2, every) - count(1, every) for every in (0, 1))
                outside = count(1, 0) - neural
        except (RuntimeError, TypeError, OverflowError) as error:
            # Even on the meta device, sizes beyond 64 bits fail.
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


# The architectures by their name, the value of `kind` under [model].
ARCHITECTURES: dict[str, type[Architecture]] = {"decoder": DecoderSettings, "memory": MemorySettings}
