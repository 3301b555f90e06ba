"""The hyper-parameters of a Titans model, a decoder with neural memory; common names are those of `DecoderConfig`."""

import math
from dataclasses import dataclass, fields
from typing import Any

from redline.errors import ModelError

UPDATES = ("gated_delta", "titans")
# The limit for the attention span and for memory slots; larger values would exhaust the memory of any machine.
_MOST = 2**20
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclass(frozen=True)
class TitanConfig:
    """Every `attention_every`-th layer is attention, all others are neural memory.

    A token attends to its own segment, to the `window_segments` segments before it, and to older tokens that a bank of
    `memory_slots` slots keeps. Without slots, attention layers are sliding-window attention. `attention_every=1` uses
    attention only, `attention_every=0` neural memory only. Head counts and widths that are 0 are derived from the rest.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
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

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("vocabulary", "width", "layers", "heads", "segment", "memory_chunk", "convolution"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, not {getattr(self, name)}.")
        given = ("key_value_heads", "mlp_width", "memory_heads", "memory_key_dim", "memory_value_dim")
        for name in ("attention_every", "window_segments", "memory_slots", *given):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.span > _MOST:
            raise ModelError(f"(window_segments + 1) · segment must be at most {_MOST} tokens, not {self.span}.")
        if self.memory_slots > _MOST:
            raise ModelError(f"memory_slots must be at most {_MOST}, not {self.memory_slots}.")
        for name in ("rope_base", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ModelError(f"{name} must be above zero, not {getattr(self, name)}.")
        if self.width % (2 * self.heads):
            raise ModelError(f"the width {self.width} does not divide into {self.heads} heads of an even size.")
        if self.heads % self.shared_heads:
            raise ModelError(f"heads ({self.heads}) must be a multiple of key_value_heads ({self.shared_heads}).")
        if not self.key_dim or not self.value_dim:
            raise ModelError(
                f"the width {self.width} is too small for {self.neural_heads} memory heads: "
                "set memory_key_dim and memory_value_dim."
            )
        if self.memory_update not in UPDATES:
            raise ModelError(f"memory_update must be one of {', '.join(UPDATES)}, not {self.memory_update!r}.")
        if not 0 < self.memory_compression_ratio <= 1:
            raise ModelError(
                f"memory_compression_ratio must be above 0 and at most 1, not {self.memory_compression_ratio}."
            )

    def _check_kinds(self) -> None:
        """Raises for values of the wrong type, which a config.json may hold."""
        for field in fields(self):
            value = getattr(self, field.name)
            assert isinstance(field.type, type)
            fits = type(value) in ((int, float) if field.type is float else (field.type,))
            if not fits or (field.type is float and not math.isfinite(value)):
                raise ModelError(f"{field.name} must be {_KINDS[field.type]}, not {value!r}.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def shared_heads(self) -> int:
        """The number of key and value heads, each shared by a group of query heads."""
        return self.key_value_heads or self.heads

    @property
    def feed_forward_width(self) -> int:
        """`mlp_width` if it is set, otherwise 8/3 of the width, rounded up to a multiple of 64."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64

    @property
    def neural_heads(self) -> int:
        return self.memory_heads or self.heads

    @property
    def key_dim(self) -> int:
        return self.memory_key_dim or self.width // self.neural_heads

    @property
    def value_dim(self) -> int:
        return self.memory_value_dim or self.width // self.neural_heads

    @property
    def span(self) -> int:
        """The largest number of tokens in the attention window."""
        return (self.window_segments + 1) * self.segment

    def is_attention(self, layer: int) -> bool:
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TitanConfig":
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ModelError(f"unknown setting {unknown[0]!r} of a Titans model.")
        missing = [name for name in ("vocabulary", "width", "layers", "heads") if name not in values]
        if missing:
            raise ModelError(f"the setting {missing[0]!r} of a Titans model is missing.")
        return cls(**values)
