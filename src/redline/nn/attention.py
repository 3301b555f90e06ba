"""Causal self-attention with rotary position embedding and grouped query heads.

B: batch, S: tokens, W: width, H: query heads, G: key and value heads, D: head dimension.
"""

from typing import Protocol

from torch import Tensor

from redline.nn.causal_attention import causal_attention
from redline.nn.linear import Linear
from redline.nn.packing import Packing
from redline.nn.rms_norm import RMSNorm
from redline.nn.rope import RotaryTables
from redline.nn.switchable import DispatchedModule
from redline.ops.rope import rope


class Past(Protocol):
    """The key-value cache of a layer. `attend` stores the new keys and values, and attends to all stored ones."""

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor: ...


class GroupedQueryAttention(DispatchedModule):
    op = "rope"

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        """`norm_eps` enables RMSNorm of queries and keys. A token sees `window` tokens, including itself."""
        super().__init__()
        self.heads, self.key_value_heads, self.head_dim, self.window = heads, key_value_heads, head_dim, window
        self.qkv = Linear(width, (heads + 2 * key_value_heads) * head_dim, bias=qkv_bias)
        self.out = Linear(heads * head_dim, width, bias=out_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)

    def forward(
        self,
        x_BSW: Tensor,
        tables: RotaryTables,
        positions_BS: Tensor | None = None,
        packing: Packing | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Attends through the cache `past` if given. Otherwise a token sees the tokens of its document up to itself."""
        counts = [self.heads, self.key_value_heads, self.key_value_heads]
        split = self.qkv(x_BSW).unflatten(-1, (sum(counts), self.head_dim)).split(counts, dim=2)
        q_BSHD, k_BSGD, v_BSGD = split
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        cos, sin = tables.rows(None if positions_BS is not None else x_BSW.shape[1])
        q_BSHD, k_BSGD = rope(q_BSHD, k_BSGD, cos, sin, positions_BS, self.implementation)
        if past is None:
            mixed_BSHD = causal_attention(q_BSHD, k_BSGD, v_BSGD, self.window, packing, self.implementation)
        else:
            mixed_BSHD = past.attend(q_BSHD, k_BSGD, v_BSGD)
        return self.out(mixed_BSHD.flatten(2))
