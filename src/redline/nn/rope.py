"""The tables of rotary position embedding, which stay in fp32 when a model is converted to another dtype.

At position 100,000 a bf16 angle is off by full rotations, and a bf16 cosine by half a percent. The tables are small, so
fp32 costs little memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from redline.ops.rope import Scaling, rope_tables


class RotaryTables(nn.Module):
    """Buffers with `cos` and `sin` of every position up to `length`, each (length, head_dim / 2)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int, base: float, scaling: Scaling | None = None) -> None:
        super().__init__()
        self.length, self.head_dim, self.base, self.scaling = length, head_dim, base, scaling
        self._fill(torch.empty(0).device)

    def _fill(self, device: torch.device) -> None:
        cos, sin = rope_tables(self.length, self.head_dim, self.base, self.scaling, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryTables":
        """Recomputes the tables in fp32 if the device or dtype changes, also after `to_empty`."""
        before = self.cos
        super()._apply(fn, recurse)
        after: Any = self.cos
        if after.device != before.device or after.dtype != before.dtype:
            self._fill(after.device)
        return self

    def rows(self, count: int | None) -> tuple[Tensor, Tensor]:
        """Returns the first `count` rows of both tables, or all rows."""
        return self.cos[:count], self.sin[:count]

    def extra_repr(self) -> str:
        return f"{self.length} positions, head_dim={self.head_dim}, base={self.base:g}"
