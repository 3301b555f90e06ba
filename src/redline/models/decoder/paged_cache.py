"""The paged key-value cache of a decoder: pages of a fixed number of tokens, which rows share and give back.

T: new tokens of all rows, N: pages, P: tokens in a page, G: key and value heads, D: head dimension, M: tokens after
which logits are wanted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.models.decoder.config import DecoderConfig
from redline.ops.paged_attention import PagedRows, paged_attention


@dataclass(frozen=True, eq=False)
class PagePool:
    """The pages of all layers, (layers, 2, N, P, G, D)."""

    pages: Tensor

    @classmethod
    def make(
        cls, config: DecoderConfig, count: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> "PagePool":
        shape = (config.layers, 2, count, size, config.key_value_heads, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device))

    @staticmethod
    def page_bytes(config: DecoderConfig, size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one page in all layers."""
        return 2 * config.layers * size * config.key_value_heads * config.head_dim * dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.pages.nbytes

    def past(self, layer: int, rows: PagedRows, window: int | None) -> "PagedPast":
        return PagedPast(self.pages[layer, 0], self.pages[layer, 1], rows, window)


@dataclass(frozen=True, eq=False)
class FlatCall:
    """What a call for flat tokens needs beside the tokens: their positions, the rows, and where logits are wanted."""

    positions_T: Tensor
    sampled_M: Tensor
    rows: PagedRows
    pool: PagePool


@dataclass(frozen=True, eq=False)
class PagedPast:
    """Attention of the new tokens of many rows, flattened into one sequence, over the pages of a layer."""

    keys_NPGD: Tensor
    values_NPGD: Tensor
    rows: PagedRows
    window: int | None

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        # Under autocast the dtype of the new keys and values can differ from that of the pages.
        dtype = self.keys_NPGD.dtype
        q, k, v = (new[0].to(dtype) for new in (q_BSHD, k_BSGD, v_BSGD))
        mixed = paged_attention(q, k, v, self.keys_NPGD, self.values_NPGD, self.rows, self.window)
        return mixed[None].to(q_BSHD.dtype)
