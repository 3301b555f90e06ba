"""The hyper-parameters of a decoder with long-term memory, under the names that a plain decoder has for them."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from redline.errors import ModelError

UPDATES = ("gated_delta", "titans")
# What older config.json files call a setting.
_FORMER = {"kv_heads": "key_value_heads", "hidden": "mlp_width", "tied": "tied_embeddings"}
# Of tokens that attention sees at once, and of slots: what is more is a slip, and would fill the memory of any machine.
_MOST = 2**20
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class TitanConfig:
    """Three layers of neural memory to one of attention, unless `attention_every` says otherwise.

    Attention sees the segment that a token is in and the `window_segments` before it; what is older is read from
    `memory_slots` slots. No slots make it sliding-window attention. `attention_every=1` leaves attention alone, and
    `attention_every=0` neural memory alone. Heads and widths that are 0 follow from the others.
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
                raise ModelError(f"{name} cannot be {getattr(self, name)}.")
        if self.span > _MOST:
            raise ModelError(f"segment and window_segments let attention see {self.span} tokens: {_MOST} are the most.")
        if self.memory_slots > _MOST:
            raise ModelError(f"memory_slots can be {_MOST} at the most, not {self.memory_slots}.")
        for name in ("rope_base", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ModelError(f"{name} must be above zero, not {getattr(self, name)}.")
        if self.width % (2 * self.heads):
            raise ModelError(f"a width of {self.width} does not divide into {self.heads} heads of an even size.")
        if self.heads % self.shared_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.shared_heads} keys and values evenly.")
        if not self.key_dim or not self.value_dim:
            raise ModelError(
                f"a width of {self.width} leaves nothing for each of {self.neural_heads} memory heads: "
                "give memory_key_dim and memory_value_dim."
            )
        if self.memory_update not in UPDATES:
            raise ModelError(f"memory_update is one of {', '.join(UPDATES)}, not {self.memory_update!r}.")
        if not 0 < self.memory_compression_ratio <= 1:
            raise ModelError(f"memory_compression_ratio is above 0 and at most 1, not {self.memory_compression_ratio}.")

    def _check_kinds(self) -> None:
        """A config.json may say anything."""
        for field in fields(self):
            value = getattr(self, field.name)
            assert isinstance(field.type, type)
            fits = type(value) in ((int, float) if field.type is float else (field.type,))
            if not fits or (field.type is float and not math.isfinite(value)):
                raise ModelError(f"a memory model's {field.name} is {_KINDS[field.type]}, not {value!r}.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def shared_heads(self) -> int:
        """Of keys and values."""
        return self.key_value_heads or self.heads

    @property
    def feed_forward_width(self) -> int:
        """8/3 of the width, in steps of 64, unless given."""
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
        """Tokens that attention sees at the most."""
        return (self.window_segments + 1) * self.segment

    def is_attention(self, layer: int) -> bool:
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TitanConfig":
        # Where a setting followed from the others, older files say null.
        named = {_FORMER.get(name, name): value for name, value in values.items() if value is not None}
        unknown = sorted(set(named) - set(cls.__dataclass_fields__))
        if unknown:
            raise ModelError(f"a memory model has no setting {unknown[0]!r}.")
        missing = [name for name in ("vocabulary", "width", "layers", "heads") if name not in named]
        if missing:
            raise ModelError(f"the memory model's settings are incomplete: there is no {missing[0]}.")
        return cls(**named)
