"""The slot bank: a fixed number of older tokens that attention reads in addition to its window.

A slot holds the key and value of a token that has left the window, a score (how much the model wants to keep it), a
mass (the number of tokens merged into it, 0 for an empty slot), a moving average of the attention it receives, and its
age in tokens. Attention is one softmax over slots and window; the logit of a slot is q·k/√d + log σ(score) + log mass.
Keys in the bank have no rotary position, so distant tokens are found by content and the text may have any length.

Shapes: B sequences, M slots, C candidates, H key-value heads of D channels.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.ops.slot_write import Slots, slot_write

USAGE_DECAY = 0.99


@dataclass(frozen=True)
class SlotBank:
    """An immutable bank: every change returns a new one."""

    key_BMHD: Tensor
    value_BMHD: Tensor
    score_BM: Tensor
    mass_BM: Tensor
    usage_BM: Tensor
    age_BM: Tensor
    # Counts over all tokens offered so far: written to their own slot, merged into a slot, evicted from a slot.
    writes_B: Tensor
    merges_B: Tensor
    evictions_B: Tensor

    @classmethod
    def empty(
        cls, batch: int, slots: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> "SlotBank":
        number = torch.promote_types(dtype, torch.float32)
        vectors = [torch.zeros(batch, slots, heads, head_dim, device=device, dtype=dtype) for _ in range(2)]
        scalars = [torch.zeros(batch, slots, device=device, dtype=number) for _ in range(4)]
        counts = [torch.zeros(batch, device=device, dtype=torch.int64) for _ in range(3)]
        return cls(*vectors, *scalars, *counts)

    @property
    def slots(self) -> int:
        return self.mass_BM.shape[1]

    @property
    def filled_BM(self) -> Tensor:
        return self.mass_BM > 0

    @property
    def bias_BM(self) -> Tensor:
        """Returns the bias that is added to the logit of each slot; minus infinity for empty slots."""
        bias = F.logsigmoid(self.score_BM) + self.mass_BM.clamp_min(1).log()
        return bias.masked_fill(~self.filled_BM, -torch.inf)

    def with_read(self, attention_BTM: Tensor) -> "SlotBank":
        """Returns the bank with usage and age updated after T consecutive queries, given their attention weights."""
        count = attention_BTM.shape[1]
        steps = torch.arange(count - 1, -1, -1, device=attention_BTM.device, dtype=self.usage_BM.dtype)
        weights = (1 - USAGE_DECAY) * USAGE_DECAY**steps
        usage = USAGE_DECAY**count * self.usage_BM + torch.einsum("btm,t->bm", attention_BTM.detach(), weights)
        return replace(self, usage_BM=usage, age_BM=self.age_BM + count)

    def with_written(
        self,
        key_BCHD: Tensor,
        value_BCHD: Tensor,
        score_BC: Tensor,
        ratio: float,
        adaptive: bool,
        threshold: float,
        due_B: Tensor | None = None,
    ) -> "SlotBank":
        """Returns the bank after writing the best ⌈ratio · C⌉ candidates, the best first.

        With `adaptive`, writes only candidates with σ(score) above one half. A candidate is merged into the most
        similar slot if their cosine similarity exceeds `threshold`. Otherwise it is written to an empty slot, or,
        if there is none, replaces the slot with the lowest score, provided that the candidate's score is higher. Only
        the sequences in `due_B` change.
        """
        # An epsilon is subtracted before rounding up, because 0.07 · 100 is 7.000000000000001 in floating point.
        count = math.ceil(ratio * score_BC.shape[1] - 1e-9)
        best = score_BC.topk(min(count, score_BC.shape[1]), dim=1)
        wanted_BC = best.values > 0 if adaptive else torch.ones_like(best.values, dtype=torch.bool)
        if due_B is not None:
            wanted_BC = wanted_BC & due_B[:, None]
        offered = (gather_rows(key_BCHD, best.indices), gather_rows(value_BCHD, best.indices), best.values)
        slots = Slots(self.key_BMHD, self.value_BMHD, self.score_BM, self.mass_BM, self.usage_BM, self.age_BM)
        after, written = slot_write(slots, *offered, wanted_BC, threshold)
        counts = (self.writes_B + written.placed_B, self.merges_B + written.merged_B)
        return SlotBank(*after, *counts, self.evictions_B + written.evicted_B)

    def reduced_to(self, slots: int) -> "SlotBank":
        """Returns a bank with fewer slots: removes empty slots first, then merges the most similar pairs."""
        bank = self
        while bank.slots > slots:
            bank = bank._without_one_slot()
        return bank

    def _without_one_slot(self) -> "SlotBank":
        filled = self.filled_BM
        keys = F.normalize(self.key_BMHD.flatten(2).float(), dim=-1)
        cosine = (keys @ keys.transpose(1, 2)).masked_fill(~(filled.unsqueeze(1) & filled.unsqueeze(2)), -torch.inf)
        upper = torch.ones(self.slots, self.slots, dtype=torch.bool, device=keys.device).triu(1)
        pair_B = cosine.masked_fill(~upper, -torch.inf).flatten(1).argmax(1)
        into_B, gone_B = pair_B // self.slots, pair_B % self.slots
        # If a sequence has an empty slot, that slot is removed, and nothing is merged.
        full_B = filled.all(1)
        gone_B = torch.where(full_B, gone_B, filled.to(torch.int8).argmin(1))
        into_B = torch.where(full_B, into_B, gone_B)
        one_B, other_B = _row(self.mass_BM, into_B), _row(self.mass_BM, gone_B) * full_B
        share_B = other_B / (one_B + other_B).clamp_min(1)

        def put(before: Tensor, now: Tensor) -> Tensor:
            here = torch.arange(self.slots, device=into_B.device) == into_B[:, None]
            return torch.where(here.view(*here.shape, *[1] * (before.ndim - 2)), now.unsqueeze(1), before)

        def mixed(vectors: Tensor) -> Tensor:
            share = share_B.to(vectors.dtype)[:, None, None]
            return put(vectors, torch.lerp(_row(vectors, into_B), _row(vectors, gone_B), share))

        merged = replace(
            self,
            key_BMHD=mixed(self.key_BMHD),
            value_BMHD=mixed(self.value_BMHD),
            score_BM=put(self.score_BM, torch.maximum(_row(self.score_BM, into_B), _row(self.score_BM, gone_B))),
            mass_BM=put(self.mass_BM, one_B + other_B),
            usage_BM=put(self.usage_BM, _row(self.usage_BM, into_B) + _row(self.usage_BM, gone_B) * full_B),
            age_BM=put(self.age_BM, torch.maximum(_row(self.age_BM, into_B), _row(self.age_BM, gone_B))),
            merges_B=self.merges_B + full_B,
        )
        order = torch.arange(self.slots - 1, device=gone_B.device)
        left_BM = order + (order >= gone_B[:, None])
        held = {f.name: gather_rows(getattr(merged, f.name), left_BM) for f in fields(self) if "_BM" in f.name}
        return replace(merged, **held)


def gather_rows(tensor_BL: Tensor, rows_BC: Tensor) -> Tensor:
    """Returns `tensor_BL[b, rows_BC[b]]` for each sequence b."""
    return tensor_BL[torch.arange(len(rows_BC), device=rows_BC.device)[:, None], rows_BC]


def _row(tensor: Tensor, index_B: Tensor) -> Tensor:
    """Returns `tensor[b, index_B[b]]` for each sequence b."""
    return tensor[torch.arange(len(index_B), device=index_B.device), index_B]
