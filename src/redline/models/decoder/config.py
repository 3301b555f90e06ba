"""The hyper-parameters of a decoder, with every option in which the supported model families differ."""

from dataclasses import dataclass

from redline.errors import ModelError
from redline.files.config_fields import check_fields
from redline.files.limits import PositiveFloat, PositiveInt
from redline.ops.rope import Scaling


@dataclass(frozen=True)
class DecoderConfig:
    """`context` is the largest number of positions. `key_value_heads` and `head_dim` default to `heads` and
    `width // heads`. `windows` holds the sliding window of each layer in tokens, including the current token, or None
    for full attention; an empty tuple means full attention in all layers."""

    vocabulary: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    key_value_heads: int = 0
    head_dim: int = 0
    context: PositiveInt = 4096
    rope_base: PositiveFloat = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: PositiveFloat = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    query_key_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[PositiveInt | None, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        if not self.head_dim:
            if self.width % self.heads:
                raise ModelError(f"width ({self.width}) is not a multiple of heads ({self.heads}): set head_dim.")
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if not self.key_value_heads:
            object.__setattr__(self, "key_value_heads", self.heads)
        if self.key_value_heads < 1 or self.heads % self.key_value_heads:
            raise ModelError(f"heads ({self.heads}) must be a multiple of key_value_heads ({self.key_value_heads}).")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, not {self.head_dim}.")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if len(self.windows) != self.layers:
            raise ModelError(f"windows must have one entry for each of {self.layers} layers, not {len(self.windows)}.")

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied embedding counts once."""
        heads, shared = self.heads * self.head_dim, 2 * self.key_value_heads * self.head_dim
        attention = self.width * (heads + shared) + heads * self.width
        attention += (heads + shared) * self.qkv_bias + self.width * self.out_bias
        attention += 2 * self.head_dim * self.query_key_norm
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        embeddings = self.vocabulary * self.width * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * block + self.width
