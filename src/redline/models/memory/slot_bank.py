"""The slot bank: a fixed number of remembered tokens that attention reads beside its window.

A slot holds the key and value of a token that has left the window, a score (how much the model wants to keep it), a
mass (how many tokens were merged into it; 0 is an empty slot), a moving average of the attention it gets, and its age
in tokens. A read is one softmax over slots and window; a slot's logit is q·k/√d + log σ(score) + log mass. Keys carry
no rotation: what is far away is found by what it says, so that a bank serves any length.

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
    """The bank as a value: every change gives a new one."""

    key_BMHD: Tensor
    value_BMHD: Tensor
    score_BM: Tensor
    mass_BM: Tensor
    usage_BM: Tensor
    age_BM: Tensor
    # Of all tokens offered so far: written into a slot of their own, merged into one, thrown out of one.
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
        """What a slot's logit has beside the product of query and key; minus infinity where the slot is empty."""
        bias = F.logsigmoid(self.score_BM) + self.mass_BM.clamp_min(1).log()
        return bias.masked_fill(~self.filled_BM, -torch.inf)

    def with_read(self, attention_BTM: Tensor) -> "SlotBank":
        """After T queries one after the other, each with its share of attention on every slot."""
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
        """Takes in the best ⌈ratio · C⌉ of the candidates; adaptive: of those, only what scores above one half.

        One after the other, the best first: merged into the most similar slot, or put into an empty one, or in place of
        the one that scores least. Sequences that are not due stay as they are.
        """
        # Less a little: 0.07 · 100 is 7.000000000000001.
        count = math.ceil(ratio * score_BC.shape[1] - 1e-9)
        best = score_BC.topk(min(count, score_BC.shape[1]), dim=1)
        wanted_BC = best.values > 0 if adaptive else torch.ones_like(best.values, dtype=torch.bool)
        if due_B is not None:
            wanted_BC = wanted_BC & due_B[:, None]
        offered = (taken(key_BCHD, best.indices), taken(value_BCHD, best.indices), best.values)
        slots = Slots(self.key_BMHD, self.value_BMHD, self.score_BM, self.mass_BM, self.usage_BM, self.age_BM)
        after, written = slot_write(slots, *offered, wanted_BC, threshold)
        counts = (self.writes_B + written.placed_B, self.merges_B + written.merged_B)
        return SlotBank(*after, *counts, self.evictions_B + written.evicted_B)

    def reduced_to(self, slots: int) -> "SlotBank":
        """Fewer slots: the most similar two are merged, again and again; empty ones go first."""
        bank = self
        while bank.slots > slots:
            bank = bank._one_fewer()
        return bank

    def _one_fewer(self) -> "SlotBank":
        filled = self.filled_BM
        keys = F.normalize(self.key_BMHD.flatten(2).float(), dim=-1)
        cosine = (keys @ keys.transpose(1, 2)).masked_fill(~(filled.unsqueeze(1) & filled.unsqueeze(2)), -torch.inf)
        upper = torch.ones(self.slots, self.slots, dtype=torch.bool, device=keys.device).triu(1)
        pair_B = cosine.masked_fill(~upper, -torch.inf).flatten(1).argmax(1)
        into_B, gone_B = pair_B // self.slots, pair_B % self.slots
        # Where a slot is empty it goes, and nothing is merged.
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
        held = {f.name: taken(getattr(merged, f.name), left_BM) for f in fields(self) if "_BM" in f.name}
        return replace(merged, **held)


def taken(tensor_BL: Tensor, rows_BC: Tensor) -> Tensor:
    """Several rows of each sequence's second dimension."""
    return tensor_BL[torch.arange(len(rows_BC), device=rows_BC.device)[:, None], rows_BC]


def _row(tensor: Tensor, index_B: Tensor) -> Tensor:
    """Row `index` of each sequence's second dimension."""
    return tensor[torch.arange(len(index_B), device=index_B.device), index_B]
