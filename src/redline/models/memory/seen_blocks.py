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

    # Inside a document tokens are as far apart in their row as their positions are.
    nearest_NN, farthest_NN = first[:, None] - last, last[:, None] - first
    distances_NN = farthest_NN > window_segments * segment if beyond else nearest_NN < (window_segments + 1) * segment
    earlier_NN = first[:, None] >= first
    listed_BNN = (earlier_NN & distances_NN) & (first_document_BN[:, :, None] <= last_document_BN[:, None])

    youngest_BNN = first_segment_BN[:, :, None] - last_segment_BN[:, None]
    oldest_BNN = last_segment_BN[:, :, None] - first_segment_BN[:, None]
    ages_BNN = youngest_BNN > window_segments if beyond else oldest_BNN <= window_segments
    whole_NN = (first[:, None] > last) & (last[:, None] - first[:, None] == _BLOCK - 1)
    full_BNN = (last_document_BN[:, :, None] == first_document_BN[:, None]) & ages_BNN & whole_NN
    return BlockMask.from_kv_blocks(
        *_in_order((listed_BNN & ~full_BNN)[:, None]),
        *_in_order((listed_BNN & full_BNN)[:, None]),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _in_order(listed: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each one sees, and which, first of all."""
    which = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return listed.sum(-1).to(torch.int32), which.to(torch.int32)
