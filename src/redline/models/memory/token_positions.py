"""The document, position, segment and rotation of every token of one forward pass, and the masks of flex attention.

B: batch, S: tokens in a row, N: blocks in a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from redline.errors import ModelError
from redline.models.memory.config import TitanConfig
from redline.nn.packing import Packing
from redline.ops.rope import rope

# The smallest head dimension that flex attention supports.
LEAST_CHANNELS = 16
_BLOCK = 128
# A mask function of flex attention: (batch, head, query, key) to bool.
MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class BlockMasks:
    """The block masks of flex attention: they list the blocks of keys to which each block of queries attends.

    `create_block_mask` evaluates the mask for every pair of tokens and cannot be compiled inside a checkpointed region.
    This class reads only the first and last token of each block. Positions increase within a document and document
    numbers increase along a row, so a block with a visible token is never skipped. A block without a visible token may
    be listed, which only costs time.

    `near` covers the tokens of a document inside the window, `beyond` the tokens that have left it.

    The masks are built once for all layers and outside of them: block masks built inside a layer that is compiled and
    checkpointed caused illegal memory accesses on a GPU (torch 2.11).
    """

    near: BlockMask
    beyond: BlockMask | None = None

    @classmethod
    def of(
        cls,
        positions_BS: Tensor,
        documents_BS: Tensor | None,
        segment: int,
        window_segments: int,
        with_beyond: bool = False,
    ) -> "BlockMasks":
        segments_BS = positions_BS // segment
        documents = torch.zeros_like(positions_BS) if documents_BS is None else documents_BS

        def is_near(b: Any, h: Any, q: Any, k: Any) -> Any:
            recent = segments_BS[b, q] - segments_BS[b, k] <= window_segments
            return (k <= q) & (documents[b, q] == documents[b, k]) & recent

        def is_beyond(b: Any, h: Any, q: Any, k: Any) -> Any:
            outside = segments_BS[b, q] - segments_BS[b, k] > window_segments
            return (k <= q) & (documents[b, q] == documents[b, k]) & outside

        arguments = positions_BS, documents, segment, window_segments
        near = _mask(is_near, *arguments, beyond=False)
        return cls(near, _mask(is_beyond, *arguments, beyond=True) if with_beyond else None)


def _mask(
    mask: MaskFunction, positions_BS: Tensor, documents_BS: Tensor, segment: int, window_segments: int, beyond: bool
) -> BlockMask:
    length = positions_BS.shape[1]
    blocks = -(-length // _BLOCK)
    last = torch.arange(1, blocks + 1, device=positions_BS.device) * _BLOCK - 1
    last = last.clamp(max=length - 1)
    first = torch.arange(blocks, device=positions_BS.device) * _BLOCK
    first_document_BN, last_document_BN = documents_BS[:, first], documents_BS[:, last]
    first_segment_BN, last_segment_BN = positions_BS[:, first] // segment, positions_BS[:, last] // segment

    one_document_BNN = first_document_BN[:, :, None] == last_document_BN[:, None]
    same_ends_BNN = last_document_BN[:, :, None] == first_document_BN[:, None]
    youngest_BNN = first_segment_BN[:, :, None] - last_segment_BN[:, None]
    oldest_BNN = last_segment_BN[:, :, None] - first_segment_BN[:, None]
    # Positions in different documents cannot be compared, so these are distances in the row. Within a document, they
    # equal the differences of positions.
    nearest_NN, farthest_NN = first[:, None] - last, last[:, None] - first
    if beyond:
        seen_BNN = (farthest_NN > window_segments * segment) & (~same_ends_BNN | (oldest_BNN > window_segments))
        all_seen_BNN = same_ends_BNN & (youngest_BNN > window_segments)
    else:
        near_NN = nearest_NN < (window_segments + 1) * segment
        seen_BNN = near_NN & (~one_document_BNN | (youngest_BNN <= window_segments))
        all_seen_BNN = same_ends_BNN & (oldest_BNN <= window_segments)
    reach_BNN = (first[:, None] >= first) & (first_document_BN[:, :, None] <= last_document_BN[:, None])
    listed_BNN = reach_BNN & seen_BNN
    full_BNN = all_seen_BNN & (first[:, None] > last) & (last - first == _BLOCK - 1)[:, None]
    full_B1NN = (listed_BNN & full_BNN)[:, None]
    partly_B1NN = (listed_BNN & ~full_BNN)[:, None]
    return BlockMask(
        (length, length),
        *_block_lists(partly_B1NN),
        *_block_lists(full_B1NN),
        *_block_lists(partly_B1NN.mT),
        *_block_lists(full_B1NN.mT),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=mask,
    )


def _block_lists(listed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of listed blocks per row, and the block indices with the listed ones first.

    Orders the indices by a scatter. torch's own block masks sort them, but torch excludes that sort from compilation.
    """
    count = listed.sum(-1, keepdim=True)
    place = torch.where(listed, listed.cumsum(-1) - 1, count + (~listed).cumsum(-1) - 1)
    blocks = torch.arange(listed.shape[-1], device=listed.device).expand_as(place)
    which = torch.empty_like(place, memory_format=torch.contiguous_format).scatter(-1, place, blocks)
    return count[..., 0].to(torch.int32).contiguous(), which.to(torch.int32)


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
    """The positions of all tokens. `segment_starts` are the offsets where segments begin, the same for all sequences.

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
