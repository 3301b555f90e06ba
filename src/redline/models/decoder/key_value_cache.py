"""Keys and values of the tokens that were seen: fixed buffers, so that one step can be recorded and replayed.

Every layer is a ring: the token at position p lies at p mod `ring`. A layer that sees everything has a ring as long as
the cache, one with a window needs no more than the window. Each row of the batch has a position of its own, on the
device, so that a step never waits for the host. Behind the ring lie places that nobody sees; padding is written there.

B: batch, S: new tokens, C: places in a buffer, H: heads, G: key and value heads, D: width of a head.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError
from redline.models.decoder.config import DecoderConfig
from redline.nn.attention import Past
from redline.nn.causal_attention import attention_with_past, causal_attention
from redline.ops.decode_attention import decode_attention

# The attention kernels read masks in steps of this many places.
_PLACES_MULTIPLE = 64


@dataclass(frozen=True)
class LayerCache:
    """The buffers of one layer."""

    keys_BCGD: Tensor
    values_BCGD: Tensor
    ring: int
    window: int | None

    def write(self, rows_B1: Tensor, places_BS: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> None:
        # Under autocast they come in another precision than the cache was made in.
        self.keys_BCGD[rows_B1, places_BS] = k_BSGD.to(self.keys_BCGD.dtype)
        self.values_BCGD[rows_B1, places_BS] = v_BSGD.to(self.values_BCGD.dtype)


@dataclass
class KeyValueCache:
    """`lengths_B` counts the tokens that each row holds; `room` is the most that it can hold."""

    layers: tuple[LayerCache, ...]
    lengths_B: Tensor
    room: int

    @classmethod
    def make(
        cls, config: DecoderConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> "KeyValueCache":
        if batch < 1 or length < 1:
            raise ModelError(f"a cache is for 1 row and 1 token at least, not {batch} and {length}.")
        if length > config.context:
            raise ModelError(f"a cache for {length} tokens is longer than the model's context of {config.context}.")
        layers = []
        for window in config.windows:
            ring = length if window is None else min(window, length)
            places = -(-(ring + 1) // _PLACES_MULTIPLE) * _PLACES_MULTIPLE
            shape = (batch, places, config.key_value_heads, config.head_dim)
            # Zeros, because a place that nobody sees still enters the sum, with weight zero: a NaN would spread.
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            layers.append(LayerCache(keys, values, ring, window))
        return cls(tuple(layers), torch.zeros(batch, dtype=torch.int64, device=device), length)

    @property
    def bytes(self) -> int:
        return sum(layer.keys_BCGD.nbytes + layer.values_BCGD.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Forgets everything; the buffers stay where they are."""
        self.lengths_B.zero_()

    def copy(self) -> "KeyValueCache":
        """One that goes on from here on its own."""
        layers = (
            replace(layer, keys_BCGD=layer.keys_BCGD.clone(), values_BCGD=layer.values_BCGD.clone())
            for layer in self.layers
        )
        return KeyValueCache(tuple(layers), self.lengths_B.clone(), self.room)

    def step_pasts(self, dtype: torch.dtype, implementation: str) -> "list[StepPast] | list[FusedStepPast]":
        """What each layer needs for one more token a row; with plain PyTorch, layers with equal rings share it."""
        if implementation != "reference":
            return [FusedStepPast(layer, self.lengths_B, implementation) for layer in self.layers]
        device = self.lengths_B.device
        rows_B1 = torch.arange(len(self.lengths_B), device=device)[:, None]
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            if layer.ring not in shared:
                held = held_positions(self.lengths_B + 1, layer)
                hidden = torch.full((), float("-inf"), dtype=dtype, device=device)
                bias_BC = torch.where(held >= 0, torch.zeros((), dtype=dtype, device=device), hidden)
                shared[layer.ring] = ((self.lengths_B % layer.ring)[:, None], bias_BC[:, None, None])
        return [StepPast(layer, rows_B1, *shared[layer.ring]) for layer in self.layers]

    def chunk_pasts(self, counts_B: Tensor, length: int) -> list[Past]:
        """What each layer needs for `length` more places a row, of which the first `counts_B` are tokens.

        Asks the device how full the cache is, which waits for it: once a chunk, never once a token.
        """
        least, most = torch.stack(self.lengths_B.aminmax()).tolist()
        if most + length > self.room and int((self.lengths_B + counts_B).max()) > self.room:
            raise ModelError(f"the cache has room for {self.room} tokens, and more were given.")
        device = self.lengths_B.device
        rows_B1 = torch.arange(len(self.lengths_B), device=device)[:, None]
        index = torch.arange(length, device=device)
        positions_BS = self.lengths_B[:, None] + index
        pasts: list[Past] = []
        masks: dict[tuple[int, int | None], Tensor] = {}
        for layer in self.layers:
            # Of more tokens than the ring is long only the last stay: two writes to one place have no order.
            stays = (index < counts_B[:, None]) & (index >= counts_B[:, None] - layer.ring)
            places_BS = torch.where(stays, positions_BS % layer.ring, layer.keys_BCGD.shape[1] - 1)
            if not most:
                pasts.append(StartPast(layer, rows_B1, places_BS))
                continue
            if least == most and most + length <= layer.ring:
                pasts.append(LevelPast(layer, rows_B1, places_BS, most + length))
                continue
            bound, kind = min(most, layer.ring), (layer.ring, layer.window)
            if kind in masks:
                pasts.append(ChunkPast(layer, rows_B1, places_BS, bound, masks[kind]))
                continue
            held_BC = held_positions(self.lengths_B, layer)[:, :bound]
            sees_old = (held_BC >= 0)[:, None].expand(-1, length, -1)
            ago = index[:, None] - index
            sees_new = (ago >= 0).expand(len(self.lengths_B), -1, -1)
            if layer.window is not None:
                sees_old = sees_old & (positions_BS[:, :, None] - held_BC[:, None] < layer.window)
                sees_new = sees_new & (ago < layer.window)
            masks[kind] = torch.cat((sees_old, sees_new), 2)[:, None]
            pasts.append(ChunkPast(layer, rows_B1, places_BS, bound, masks[kind]))
        return pasts


def held_positions(lengths_B: Tensor, layer: LayerCache) -> Tensor:
    """Which position lies at each place once a row has this many tokens; negative where none does."""
    place = torch.arange(layer.keys_BCGD.shape[1], device=lengths_B.device)
    newest = lengths_B[:, None] - 1
    return torch.where(place < layer.ring, newest - (newest - place) % layer.ring, -1)


@dataclass(frozen=True)
class StepPast:
    """One token a row: written first, then all that is held is seen through the bias."""

    layer: LayerCache
    rows_B1: Tensor
    places_B1: Tensor
    bias_B11C: Tensor

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        self.layer.write(self.rows_B1, self.places_B1, k_BSGD, v_BSGD)
        groups = k_BSGD.shape[2]
        # Heads that share a key head see the same: they stand as its queries, and no key is copied for them.
        q_BGRD = q_BSHD[:, 0].unflatten(1, (groups, -1))
        keys, values = self.layer.keys_BCGD.transpose(1, 2), self.layer.values_BCGD.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q_BGRD, keys, values, attn_mask=self.bias_B11C)
        return mixed.flatten(1, 2)[:, None]


@dataclass(frozen=True)
class FusedStepPast:
    """The same in one operator, which reads no more places than are held."""

    layer: LayerCache
    lengths_B: Tensor
    implementation: str

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        layer, new = self.layer, (q_BSHD[:, 0], k_BSGD[:, 0], v_BSGD[:, 0])
        held = (layer.keys_BCGD, layer.values_BCGD, self.lengths_B, layer.ring)
        return decode_attention(*new, *held, self.implementation)[:, None]


@dataclass(frozen=True)
class StartPast:
    """The first tokens of every row: they see each other alone, as in training."""

    layer: LayerCache
    rows_B1: Tensor
    places_BS: Tensor

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        self.layer.write(self.rows_B1, self.places_BS, k_BSGD, v_BSGD)
        return causal_attention(q_BSHD, k_BSGD, v_BSGD, self.layer.window)


@dataclass(frozen=True)
class LevelPast:
    """Later tokens where all rows hold as many, and no ring has come round: written first, behind what is held,
    and each sees all `places` that lie before its own. Padding comes last, so that no token sees its places."""

    layer: LayerCache
    rows_B1: Tensor
    places_BS: Tensor
    places: int

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        self.layer.write(self.rows_B1, self.places_BS, k_BSGD, v_BSGD)
        held = (buffer[:, : self.places].to(q_BSHD.dtype) for buffer in (self.layer.keys_BCGD, self.layer.values_BCGD))
        return attention_with_past(q_BSHD, *held)


@dataclass(frozen=True)
class ChunkPast:
    """Any later tokens: what is held stands before them, and is read before a ring is written over."""

    layer: LayerCache
    rows_B1: Tensor
    places_BS: Tensor
    bound: int
    sees_B1SC: Tensor

    def attend(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        repeats = q_BSHD.shape[2] // k_BSGD.shape[2]
        pairs = ((self.layer.keys_BCGD, k_BSGD), (self.layer.values_BCGD, v_BSGD))
        keys, values = (torch.cat((held[:, : self.bound], new), dim=1) for held, new in pairs)
        if repeats > 1:
            keys, values = (one.repeat_interleave(repeats, dim=2) for one in (keys, values))
        self.layer.write(self.rows_B1, self.places_BS, k_BSGD, v_BSGD)
        q, k, v = (one.transpose(1, 2) for one in (q_BSHD, keys, values))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees_B1SC)
        return mixed.transpose(1, 2)
