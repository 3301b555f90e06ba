"""The hyper-parameters of a decoder with long-term memory."""

from dataclasses import asdict, dataclass
from typing import Any

from redline.errors import ModelError

UPDATES = ("gated_delta", "titans")


@dataclass(frozen=True)
class TitanConfig:
    """Three layers of neural memory to one of attention, unless `attention_every` says otherwise.

    Attention sees the segment that a token is in and the `window_segments` before it; what is older is read from
    `memory_slots` slots. No slots make it sliding-window attention. `attention_every=1` leaves attention alone, and
    `attention_every=0` neural memory alone.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    attention_every: int = 4
    memory_update: str = "gated_delta"
    memory_heads: int | None = None
    memory_key_dim: int | None = None
    memory_value_dim: int | None = None
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
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "segment", "memory_chunk", "convolution"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("attention_every", "window_segments", "memory_slots"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} cannot be {getattr(self, name)}.")
        if self.width % (2 * self.heads):
            raise ModelError(f"a width of {self.width} does not divide into {self.heads} heads of an even size.")
        if self.heads % self.key_value_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.key_value_heads} keys and values evenly.")
        if self.memory_update not in UPDATES:
            raise ModelError(f"memory_update is one of {', '.join(UPDATES)}, not {self.memory_update!r}.")
        if not 0 < self.memory_compression_ratio <= 1:
            raise ModelError(f"memory_compression_ratio is above 0 and at most 1, not {self.memory_compression_ratio}.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden_width(self) -> int:
        """Of the feed-forward layer: 8/3 of the width, in steps of 64, unless given."""
        return self.hidden or -(-8 * self.width // (3 * 64)) * 64

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
        """Tokens that attention sees at the most."""
        return (self.window_segments + 1) * self.segment

    def is_attention(self, layer: int) -> bool:
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TitanConfig":
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ModelError(f"a memory model has no setting {unknown[0]!r}.")
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"the memory model's settings are incomplete: {error}.") from error
