"""The document, position, segment and rotation of every token of one forward pass."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.memory.block_masks import LEAST_CHANNELS, BlockMasks
from redline.models.memory.config import TitanConfig
from redline.nn.packing import Packing
from redline.ops.rope import rope


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine tables with one row for every token of the batch, computed once for all layers.

    Angles are computed in fp64: in fp32 the angle of the fastest channel pair is off by up to 0.1 at the millionth
    token.
    """

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


@dataclass(frozen=True)
class TokenPositions:
    """`segment_starts` are the offsets at which a segment begins, the same for all sequences.

    `block_masks` are the masks for flex attention, built on a GPU only.
    """

    positions_BS: Tensor
    documents_BS: Tensor | None
    rotation: Rotation
    segment_starts: tuple[int, ...] = ()
    block_masks: BlockMasks | None = None

    @classmethod
    def whole(cls, tokens_BS: Tensor, documents: Tensor | Packing | None, config: TitanConfig) -> "TokenPositions":
        """Returns the positions of whole sequences; they start at 0 in every document."""
        documents_BS, offsets = None, torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        if documents is not None:
            documents_BS, offsets = _document_numbers(documents)
            if documents_BS.shape != tokens_BS.shape:
                raise ModelError(
                    f"documents have the shape {tuple(documents_BS.shape)}, but the tokens {tuple(tokens_BS.shape)}."
                )
        rotation, block_masks = Rotation.at(offsets, config.head_dim, config.rope_base), None
        if tokens_BS.is_cuda and config.attention_every and config.head_dim >= LEAST_CHANNELS:
            window = config.segment, config.window_segments
            block_masks = BlockMasks.of(offsets, documents_BS, *window, with_beyond=config.memory_slots > 0)
        return cls(offsets, documents_BS, rotation, block_masks=block_masks)

    @classmethod
    def after(
        cls, position_B: Tensor, count: int, config: TitanConfig, segment_starts: tuple[int, ...] = ()
    ) -> "TokenPositions":
        """Returns the positions of the next `count` tokens of each sequence."""
        positions = position_B[:, None] + torch.arange(count, device=position_B.device)
        return cls(positions, None, Rotation.at(positions, config.head_dim, config.rope_base), segment_starts)

    def part(self, begin: int, end: int) -> "TokenPositions":
        rotation = replace(self.rotation, rows_BS=self.rotation.rows_BS[:, begin:end])
        return TokenPositions(self.positions_BS[:, begin:end], None, rotation)


def _document_numbers(documents: Tensor | Packing) -> tuple[Tensor, Tensor]:
    """Returns the number of each token's document and the token's position in it.

    Unlike `Packing.of`, this does not count the documents, which would synchronize with the device.
    """
    if isinstance(documents, Packing):
        return documents.documents_BS, documents.positions_BS
    if documents.ndim != 2 or documents.is_floating_point():
        raise ModelError(
            f"documents must be integers of shape (batch, tokens), not {documents.dtype} of shape "
            f"{tuple(documents.shape)}."
        )
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    offsets = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return begins.cumsum(1), offsets - torch.where(begins, offsets, 0).cummax(1).values
