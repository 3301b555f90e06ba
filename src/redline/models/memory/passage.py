"""Where the tokens of one call stand: in which document, at which position, across which borders of segments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.models.memory.config import TitanConfig
from redline.models.memory.rotation import Rotation


@dataclass(frozen=True)
class Passage:
    """`borders` are the offsets at which a segment begins; the same for all sequences."""

    positions_BS: Tensor
    documents_BS: Tensor | None
    rotation: Rotation
    borders: tuple[int, ...] = ()

    @classmethod
    def whole(cls, tokens_BS: Tensor, documents_BS: Tensor | None, config: TitanConfig) -> "Passage":
        """Texts from their beginning; positions count anew in every document."""
        places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        if documents_BS is not None:
            new = torch.ones_like(documents_BS, dtype=torch.bool)
            new[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
            places = places - torch.where(new, places, 0).cummax(1).values
        return cls(places, documents_BS, Rotation.at(places, config.head_dim, config.rope_base))

    @classmethod
    def after(cls, position_B: Tensor, count: int, config: TitanConfig, borders: tuple[int, ...] = ()) -> "Passage":
        """The next tokens of each sequence."""
        positions = position_B[:, None] + torch.arange(count, device=position_B.device)
        return cls(positions, None, Rotation.at(positions, config.head_dim, config.rope_base), borders)

    def part(self, begin: int, end: int) -> "Passage":
        rotation = Rotation(self.rotation.cos_RD, self.rotation.sin_RD, self.rotation.rows_BS[:, begin:end])
        return Passage(self.positions_BS[:, begin:end], None, rotation)
