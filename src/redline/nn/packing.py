"""Where the documents lie in rows of tokens that hold several: what attention must not cross.

A row of a packed batch holds documents one after the other. Attention stays inside a document, and positions begin
anew in each. `Packing` holds what the attention kernels want to know of it. Counting the documents means waiting for
the device, so it is best made on the host, where the batch is put together, and moved with it.

B: batch, S: tokens in a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError

_LEAST_BORDERS = 16


@dataclass(frozen=True)
class Packing:
    """Documents by number, by position inside, and by their borders in all rows laid end to end.

    `borders` is filled up with empty documents to a power of two: a compiled model sees few sizes of it. Where every
    row is one document nothing is filled up, so that its size, which the host knows, tells these batches apart.
    """

    documents_BS: Tensor
    positions_BS: Tensor
    borders: Tensor

    @classmethod
    def of(cls, documents_BS: Tensor) -> "Packing":
        """From a number for each token; a new document begins where it changes, and in every row."""
        if documents_BS.ndim != 2 or documents_BS.is_floating_point():
            raise ModelError(
                f"documents are whole numbers of shape (batch, tokens), not {documents_BS.dtype} of shape "
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
        # A number that comes again later in the row is another document: numbered anew, equal means the same.
        return cls(begins.cumsum(dim=1), index - starts, borders)

    def to(self, device: torch.device | str) -> "Packing":
        moved = (t.to(device, non_blocking=True) for t in (self.documents_BS, self.positions_BS, self.borders))
        return Packing(*moved)

    @property
    def is_whole(self) -> bool:
        """Whether every row is one document, so that nothing keeps tokens apart."""
        return self.borders.shape[0] == self.documents_BS.shape[0] + 1

    @property
    def same_BSS(self) -> Tensor:
        """Whether two tokens of a row are of one document."""
        return self.documents_BS[:, :, None] == self.documents_BS[:, None, :]
