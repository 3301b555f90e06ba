"""The hyper-parameters of a Titans model, a decoder with neural memory; common names are those of `DecoderConfig`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from redline.errors import ModelError
from redline.files.config_fields import check_fields, decode
from redline.files.limits import NonNegativeInt, PositiveFloat, PositiveInt

# The limit for the attention span and for memory slots; larger values would exhaust the memory of any machine.
_MOST = 2**20


@dataclass(frozen=True)
class TitanConfig:
    """Every `attention_every`-th layer is attention, all others are neural memory.

    A token attends to its own segment, to the `window_segments` segments before it, and to older tokens that a bank of
    `memory_slots` slots keeps. Without slots, attention layers are sliding-window attention. `attention_every=1` uses
    attention only, `attention_every=0` neural memory only. Head counts and widths that are 0 are derived from the rest.
    """

    vocabulary: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    key_value_heads: NonNegativeInt = 0
    mlp_width: NonNegativeInt = 0
    attention_every: NonNegativeInt = 4
    memory_update: Literal["gated_delta", "titans"] = "gated_delta"
    memory_heads: NonNegativeInt = 0
    memory_key_dim: NonNegativeInt = 0
    memory_value_dim: NonNegativeInt = 0
    memory_chunk: PositiveInt = 64
    convolution: PositiveInt = 4
    segment: PositiveInt = 128
    window_segments: NonNegativeInt = 1
    memory_slots: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    memory_compression_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.25
    use_adaptive_compression: bool = False
    merge_cosine: float = 0.98
    rope_base: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        if self.span > _MOST:
            raise ModelError(f"(window_segments + 1) · segment must be at most {_MOST} tokens, not {self.span}.")
        if self.width % (2 * self.heads):
            raise ModelError(f"the width {self.width} does not divide into {self.heads} heads of an even size.")
        if self.heads % self.shared_heads:
            raise ModelError(f"heads ({self.heads}) must be a multiple of key_value_heads ({self.shared_heads}).")
        if not self.key_dim or not self.value_dim:
            raise ModelError(
                f"the width {self.width} is too small for {self.neural_heads} memory heads: "
                "set memory_key_dim and memory_value_dim."
            )

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
        return decode(cls, values, "in the config of a Titans model", ModelError)
