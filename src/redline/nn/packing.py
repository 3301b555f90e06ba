"""The document boundaries of packed sequences, which attention must not cross.

A row of a packed batch holds several documents one after the other. Attention stays inside a document, and positions
restart in each. `Packing` holds the document boundaries as the attention kernels need them. Create it on the host
together with the batch, and move both to the device: creating it on the device would synchronize.

B: batch, S: tokens in a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError

_LEAST_BORDERS = 16


@dataclass(frozen=True)
class Packing:
    """The document index and the position of each token, and the boundaries of documents in the concatenated rows.

    `borders` is padded with empty documents to a power of two, so that a compiled model sees few different sizes. If
    every row is one document, `borders` is not padded: its size, known without synchronizing, identifies such batches.
    """

    documents_BS: Tensor
    positions_BS: Tensor
    borders: Tensor

    @classmethod
    def of(cls, documents_BS: Tensor) -> "Packing":
        """Creates a packing from document indices. A document starts with each row and wherever the index changes."""
        if documents_BS.ndim != 2 or documents_BS.is_floating_point():
            raise ModelError(
                f"Packing: documents_BS must be integers of shape (batch, tokens), not {documents_BS.dtype} of shape "
                f"{tuple(documents_BS.shape)}."
            )
        length = documents_BS.shape[1]
        begins = torch.ones_like(documents_BS, dtype=torch.bool)
        begins[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        index = torch.arange(length, device=documents_BS.device).expand_as(documents_BS)
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        found = begins.flatten().nonzero().flatten().to(torch.int32)
        whole = len(found) == len(documents_BS)
        size = len(found) if whole else max(_LEAST_BORDERS, 1 << len(found).bit_length())
        borders = torch.full((size + 1,), documents_BS.numel(), dtype=torch.int32, device=documents_BS.device)
        borders[: len(found)] = found
        # Documents are renumbered, because an index that occurs again later in a row belongs to another document.
        return cls(begins.cumsum(dim=1), index - starts, borders)

    def to(self, device: torch.device | str) -> "Packing":
        moved = (t.to(device, non_blocking=True) for t in (self.documents_BS, self.positions_BS, self.borders))
        return Packing(*moved)

    @property
    def is_whole(self) -> bool:
        """Whether every row is one document, so that attention needs no boundaries."""
        return self.borders.shape[0] == self.documents_BS.shape[0] + 1

    @property
    def same_BSS(self) -> Tensor:
        """A mask (B, S, S): whether two tokens of a row are in the same document."""
        return self.documents_BS[:, :, None] == self.documents_BS[:, None, :]
