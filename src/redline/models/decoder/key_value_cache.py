"""A key-value cache of rows that are processed together, for evaluation; generation uses the pages of `paged_cache`.

Every layer has a ring buffer: the token at position p is stored in slot p mod `ring`. With full attention the ring is
as long as the cache; with a sliding window it is as long as the window. Each row of the batch has its own position.
The buffer has further slots after the ring,
which are never attended to; padding is written there.

B: batch, S: new tokens, C: slots of a buffer, H: heads, G: key and value heads, D: head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError
from redline.models.decoder.config import DecoderConfig
from redline.nn.attention import Past
from redline.nn.causal_attention import attention_with_past, causal_attention

# The number of slots is rounded up to a multiple of this, because attention kernels read masks in blocks.
_SLOTS_MULTIPLE = 64


@dataclass(frozen=True)
class LayerCache:
    """The buffers of one layer."""

    keys_BCGD: Tensor
    values_BCGD: Tensor
    ring: int
    window: int | None

    def write(self, rows_B1: Tensor, slots_BS: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> None:
        # Under autocast the dtype of the new keys and values can differ from that of the cache.
        self.keys_BCGD[rows_B1, slots_BS] = k_BSGD.to(self.keys_BCGD.dtype)
        self.values_BCGD[rows_B1, slots_BS] = v_BSGD.to(self.values_BCGD.dtype)


@dataclass
class KeyValueCache:
    """The buffers of all layers. `lengths_B` is the number of tokens in each row; `room` is the capacity of a row."""

    layers: tuple[LayerCache, ...]
    lengths_B: Tensor
    room: int

    @classmethod
    def make(
        cls, config: DecoderConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> "KeyValueCache":
        if batch < 1 or length < 1:
            raise ModelError(f"a cache needs at least 1 row and 1 token, not {batch} and {length}.")
        if length > config.context:
            raise ModelError(f"a cache for {length} tokens exceeds the model's context of {config.context}.")
        layers = []
        for window in config.windows:
            ring = length if window is None else min(window, length)
            slots = -(-(ring + 1) // _SLOTS_MULTIPLE) * _SLOTS_MULTIPLE
            shape = (batch, slots, config.key_value_heads, config.head_dim)
            # Initialized, because masked values are multiplied by a weight of zero, and zero times NaN would be NaN.
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            layers.append(LayerCache(keys, values, ring, window))
        return cls(tuple(layers), torch.zeros(batch, dtype=torch.int64, device=device), length)

    @property
    def bytes(self) -> int:
        return sum(layer.keys_BCGD.nbytes + layer.values_BCGD.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Empties the cache; the buffers keep their addresses."""
        self.lengths_B.zero_()

    def chunk_pasts(self, counts_B: Tensor, length: int) -> list[Past]:
        """Returns one `Past` per layer, for `length` new entries per row: `counts_B` tokens, then padding.

        Synchronizes with the device to read the lengths: once per chunk, never per token.
        """
        least, most = torch.stack(self.lengths_B.aminmax()).tolist()
        if most + length > self.room and int((self.lengths_B + counts_B).max()) > self.room:
            raise ModelError(f"the cache holds at most {self.room} tokens, but more were given.")
        device = self.lengths_B.device
        rows_B1 = torch.arange(len(self.lengths_B), device=device)[:, None]
        index = torch.arange(length, device=device)
        positions_BS = self.lengths_B[:, None] + index
        pasts: list[Past] = []
        masks: dict[tuple[int, int | None], Tensor] = {}
        for layer in self.layers:
            # If the chunk is longer than the ring, only its last tokens are written, because the order in which several
            # tokens are written to one slot is undefined.
            kept = (index < counts_B[:, None]) & (index >= counts_B[:, None] - layer.ring)
            slots_BS = torch.where(kept, positions_BS % layer.ring, layer.keys_BCGD.shape[1] - 1)
            if not most:
                pasts.append(StartPast(layer, rows_B1, slots_BS))
                continue
            if least == most and most + length <= layer.ring:
                pasts.append(LevelPast(layer, rows_B1, slots_BS, most + length))
                continue
            bound, kind = min(most, layer.ring), (layer.ring, layer.window)
            if kind not in masks:
                held_BC = held_positions(self.lengths_B, layer)[:, :bound]
                sees_cached = (held_BC >= 0)[:, None].expand(-1, length, -1)
                distance = index[:, None] - index
                sees_new = (distance >= 0).expand(len(self.lengths_B), -1, -1)
                if layer.window is not None:
                    sees_cached = sees_cached & (positions_BS[:, :, None] - held_BC[:, None] < layer.window)
                    sees_new = sees_new & (distance < layer.window)
                masks[kind] = torch.cat((sees_cached, sees_new), 2)[:, None]
            pasts.append(ChunkPast(layer, rows_B1, slots_BS, bound, masks[kind]))
        return pasts


def held_positions(lengths_B: Tensor, layer: LayerCache) -> Tensor:
    """Returns the position of the token in each slot (B, C) after `lengths_B` tokens; negative for empty slots."""
    slot = torch.arange(layer.keys_BCGD.shape[1], device=lengths_B.device)
    newest = lengths_B[:, None] - 1
    return torch.where(slot < layer.ring, newest - (newest - slot) % layer.ring, -1)


@dataclass(frozen=True)
class StartPast:
    """Attention with an empty cache: computes causal attention among the new tokens, as in training."""

    layer: LayerCache
    rows_B1: Tensor
    slots_BS: Tensor

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        self.layer.write(self.rows_B1, self.slots_BS, k_BSGD, v_BSGD)
        return causal_attention(q_BSHD, k_BSGD, v_BSGD, self.layer.window)


@dataclass(frozen=True)
class LevelPast(StartPast):
    """Attention of new tokens for the case that all rows have the same length and no ring has wrapped around.

    Writes the new tokens after the cached ones. Each new token attends to all slots up to its own; `slots` is the
    number of cached tokens plus new entries. Padding comes after the new tokens, so that no token attends to it.
    """

    slots: int

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        self.layer.write(self.rows_B1, self.slots_BS, k_BSGD, v_BSGD)
        held = (buffer[:, : self.slots].to(q_BSHD.dtype) for buffer in (self.layer.keys_BCGD, self.layer.values_BCGD))
        return attention_with_past(q_BSHD, *held)


@dataclass(frozen=True)
class ChunkPast(StartPast):
    """Attention of new tokens in all other cases: attends to cached and new tokens, then writes the new ones."""

    bound: int
    sees_B1SC: Tensor

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        repeats = q_BSHD.shape[2] // k_BSGD.shape[2]
        pairs = ((self.layer.keys_BCGD, k_BSGD), (self.layer.values_BCGD, v_BSGD))
        keys, values = (torch.cat((held[:, : self.bound], new), dim=1) for held, new in pairs)
        if repeats > 1:
            keys, values = (one.repeat_interleave(repeats, dim=2) for one in (keys, values))
        self.layer.write(self.rows_B1, self.slots_BS, k_BSGD, v_BSGD)
        q, k, v = (one.transpose(1, 2) for one in (q_BSHD, keys, values))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees_B1SC)
        return mixed.transpose(1, 2)
