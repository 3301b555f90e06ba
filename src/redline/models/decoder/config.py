"""The hyper-parameters of a decoder, with every option in which the supported model families differ."""

from dataclasses import dataclass

from redline.errors import ModelError
from redline.ops.rope import Scaling


@dataclass(frozen=True)
class DecoderConfig:
    """`context` is the largest number of positions. `key_value_heads` and `head_dim` default to `heads` and
    `width // heads`. `windows` holds the sliding window of each layer in tokens, including the current token, or None
    for full attention; an empty tuple means full attention in all layers."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    key_value_heads: int = 0
    head_dim: int = 0
    context: int = 4096
    rope_base: float = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    query_key_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "mlp_width", "context"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, not {getattr(self, name)}.")
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
        if self.rope_base <= 0 or self.norm_eps <= 0:
            raise ModelError("rope_base and norm_eps must be above zero.")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if len(self.windows) != self.layers:
            raise ModelError(f"windows must have one entry for each of {self.layers} layers, not {len(self.windows)}.")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("each window must be at least 1 token, or None for full attention.")

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
