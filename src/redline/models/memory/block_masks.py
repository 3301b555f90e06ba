"""Which blocks of tokens see which in a window of segments: what flex attention computes, and what it passes over.

`create_block_mask` finds it by asking for every pair of tokens, and cannot be compiled under a checkpoint. Here the
first and the last token of a block answer for all of it. Positions and numbers of documents only grow along a document
and a row, so a block is never passed over that somebody sees; one that nobody sees may be listed, and costs its time.

B: batch, S: tokens in a row, N: blocks in a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Flex attention takes no fewer.
LEAST_CHANNELS = 16
_BLOCK = 128
# Whether one token sees another: of batch, head, query and key.
Sees = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class SeenBlocks:
    """Of the tokens of each document, those in the window and those that have left it.

    Made once for all layers and outside of them: made by a layer that is compiled under a checkpoint, the lists led
    flex attention astray on a GPU (torch 2.11: illegal memory accesses).
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
    ) -> "SeenBlocks":
        segments_BS = positions_BS // segment
        documents = torch.zeros_like(positions_BS) if documents_BS is None else documents_BS

        def is_near(b: Any, h: Any, q: Any, k: Any) -> Any:
            recent = segments_BS[b, q] - segments_BS[b, k] <= window_segments
            return (k <= q) & (documents[b, q] == documents[b, k]) & recent

        def is_beyond(b: Any, h: Any, q: Any, k: Any) -> Any:
            old = segments_BS[b, q] - segments_BS[b, k] > window_segments
            return (k <= q) & (documents[b, q] == documents[b, k]) & old

        places = positions_BS, documents, segment, window_segments
        near = _mask(is_near, *places, beyond=False)
        return cls(near, _mask(is_beyond, *places, beyond=True) if with_beyond else None)


def _mask(
    sees: Sees, positions_BS: Tensor, documents_BS: Tensor, segment: int, window_segments: int, beyond: bool
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
    # Where the two tokens are of different documents their positions say nothing; but inside of a document tokens are
    # as far apart in their row as their positions are.
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
        *_in_order(partly_B1NN),
        *_in_order(full_B1NN),
        *_in_order(partly_B1NN.mT),
        *_in_order(full_B1NN.mT),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=sees,
    )


def _in_order(listed: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each one sees, and which, before those that it does not.

    Without a sort: torch itself has come to keep the one in its own masks from being compiled.
    """
    count = listed.sum(-1, keepdim=True)
    place = torch.where(listed, listed.cumsum(-1) - 1, count + (~listed).cumsum(-1) - 1)
    blocks = torch.arange(listed.shape[-1], device=listed.device).expand_as(place)
    which = torch.empty_like(place, memory_format=torch.contiguous_format).scatter(-1, place, blocks)
    return count[..., 0].to(torch.int32).contiguous(), which.to(torch.int32)
