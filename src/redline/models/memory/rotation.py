"""Rotary position embeddings for tokens at any position of a text of any length.

Angles are computed in fp64: in fp32 the angle of the fastest channel pair is off by up to 0.1 at the millionth token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.ops.rope import rope


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine tables with one row for every token of the batch, computed once for all layers."""

    cos_RD: Tensor
    sin_RD: Tensor
    rows_BS: Tensor

    @classmethod
    def at(cls, positions_BS: Tensor, head_dim: int, base: float) -> "Rotation":
        exponents = torch.arange(0, head_dim, 2, device=positions_BS.device, dtype=torch.float64) / head_dim
        angles = positions_BS.reshape(-1, 1).double() * base**-exponents
        rows = torch.arange(positions_BS.numel(), device=positions_BS.device).view_as(positions_BS)
        return cls(angles.cos().float(), angles.sin().float(), rows)

    def rotate(self, query_BSHD: Tensor, key_BSHD: Tensor) -> tuple[Tensor, Tensor]:
        return rope(query_BSHD, key_BSHD, self.cos_RD, self.sin_RD, self.rows_BS)

    def unrotate(self, key_BSHD: Tensor) -> Tensor:
        return rope(key_BSHD, key_BSHD, self.cos_RD, -self.sin_RD, self.rows_BS)[0]
