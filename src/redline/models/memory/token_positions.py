"""Where the tokens of one call stand: in which document, at which position, across which borders of segments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.memory.block_masks import LEAST_CHANNELS, SeenBlocks
from redline.models.memory.config import TitanConfig
from redline.models.memory.rotation import Rotation
from redline.nn.packing import Packing


@dataclass(frozen=True)
class Passage:
    """`borders` are the offsets at which a segment begins; the same for all sequences.

    `seen` is what flex attention asks for, on a GPU: which layers it attends in is theirs to say.
    """

    positions_BS: Tensor
    documents_BS: Tensor | None
    rotation: Rotation
    borders: tuple[int, ...] = ()
    seen: SeenBlocks | None = None

    @classmethod
    def whole(cls, tokens_BS: Tensor, documents: Tensor | Packing | None, config: TitanConfig) -> "Passage":
        """Texts from their beginning; positions count anew in every document."""
        documents_BS, places = None, torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        if documents is not None:
            documents_BS, places = _numbered(documents)
            if documents_BS.shape != tokens_BS.shape:
                raise ModelError(
                    f"documents of shape {tuple(documents_BS.shape)} do not number tokens of shape "
                    f"{tuple(tokens_BS.shape)}."
                )
        rotation, seen = Rotation.at(places, config.head_dim, config.rope_base), None
        if tokens_BS.is_cuda and config.attention_every and config.head_dim >= LEAST_CHANNELS:
            window = config.segment, config.window_segments
            seen = SeenBlocks.of(places, documents_BS, *window, with_beyond=config.memory_slots > 0)
        return cls(places, documents_BS, rotation, seen=seen)

    @classmethod
    def after(cls, position_B: Tensor, count: int, config: TitanConfig, borders: tuple[int, ...] = ()) -> "Passage":
        """The next tokens of each sequence."""
        positions = position_B[:, None] + torch.arange(count, device=position_B.device)
        return cls(positions, None, Rotation.at(positions, config.head_dim, config.rope_base), borders)

    def part(self, begin: int, end: int) -> "Passage":
        rotation = Rotation(self.rotation.cos_RD, self.rotation.sin_RD, self.rotation.rows_BS[:, begin:end])
        return Passage(self.positions_BS[:, begin:end], None, rotation)


def _numbered(documents: Tensor | Packing) -> tuple[Tensor, Tensor]:
    """The number of each token's document and its position there, where equal numbers mean the same document.

    As in `Packing.of`, whose borders nobody needs here: to count them would be to wait for the device.
    """
    if isinstance(documents, Packing):
        return documents.documents_BS, documents.positions_BS
    if documents.ndim != 2 or documents.is_floating_point():
        raise ModelError(
            f"documents are whole numbers of shape (batch, tokens), not {documents.dtype} of shape "
            f"{tuple(documents.shape)}."
        )
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return begins.cumsum(1), places - torch.where(begins, places, 0).cummax(1).values
