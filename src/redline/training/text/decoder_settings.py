"""The settings of a Llama-shaped decoder trained on text."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from redline.files.atomic import write_text
from redline.files.limits import NonNegativeInt
from redline.models.decoder import Decoder, DecoderConfig, save_decoder
from redline.models.decoder.checkpoint import read_json
from redline.models.decoder.hugging_face import family_of
from redline.nn.packing import Packing
from redline.training.text.architecture import Architecture, check_layers, kept_by_blocks, products_per_token


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
        # A shape that no Hugging Face model family can express could be trained but not saved.
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
        # The backward pass takes two products for each forward one. A token attends to half of its document on average.
        seen = min(length, 2 * self.window) if self.window else length
        channels = self.config(1).heads * self.config(1).head_dim
        return 6.0 * products_per_token(model) + 6.0 * self.layers * seen * channels

    def save(self, model: nn.Module, folder: Path, end: int | None, about: Mapping[str, Any] | None = None) -> None:
        assert isinstance(model, Decoder)
        save_decoder(model, folder, stop_tokens=() if end is None else (end,))
        if about:
            config = {**read_json(folder / "config.json"), **about}
            write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
