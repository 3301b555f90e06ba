"""The paged key-value cache of a decoder. A page holds a fixed number of tokens, and rows can share pages.

T: new tokens of all rows, N: pages, P: tokens in a page, G: key and value heads, D: head dimension, M: tokens after
which logits are wanted.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redline.models.decoder.config import DecoderConfig
from redline.ops.paged_attention import PagedRows, paged_attention


@dataclass(frozen=True, eq=False)
class PagePool:
    """The keys and values of each layer, (N, P, G, D)."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def make(cls, config: DecoderConfig, count: int, size: int, dtype: torch.dtype, device: torch.device) -> "PagePool":
        shape = (count, size, config.key_value_heads, config.head_dim)

        def pages() -> Tensor:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # Uses np.zeros, because its array takes up memory only where it has been written to.
            buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(buffer).view(dtype).view(shape)

        return cls(tuple((pages(), pages()) for _ in range(config.layers)))

    @property
    def page_size(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def past(self, layer: int, rows: PagedRows, window: int | None) -> "PagedPast":
        return PagedPast(*self.layers[layer], rows, window)


@dataclass(frozen=True, eq=False)
class FlatCall:
    """The arguments of `flat` besides the tokens: positions, the tokens that need logits, rows, and pages."""

    positions_T: Tensor
    sampled_M: Tensor
    rows: PagedRows
    pool: PagePool


@dataclass(frozen=True, eq=False)
class PagedPast:
    """Computes attention of the new tokens of many rows, flattened into one sequence, over the pages of a layer."""

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
