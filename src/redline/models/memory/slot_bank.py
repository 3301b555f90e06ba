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
        self, key_BCHD: Tensor, value_BCHD: Tensor, score_BC: Tensor, ratio: float, adaptive: bool, threshold: float
    ) -> "SlotBank":
        """Takes in the best ⌈ratio · C⌉ of the candidates; adaptive: of those, only what scores above one half."""
        # Less a little: 0.07 · 100 is 7.000000000000001.
        count = math.ceil(ratio * score_BC.shape[1] - 1e-9)
        best = score_BC.topk(min(count, score_BC.shape[1]), dim=1)
        bank = self
        for rank in range(best.indices.shape[1]):
            chosen = best.indices[:, rank]
            score = best.values[:, rank]
            wanted = score > 0 if adaptive else torch.ones_like(score, dtype=torch.bool)
            bank = bank._with_one(_row(key_BCHD, chosen), _row(value_BCHD, chosen), score, wanted, threshold)
        return bank

    def _with_one(
        self, key_BHD: Tensor, value_BHD: Tensor, score_B: Tensor, wanted_B: Tensor, threshold: float
    ) -> "SlotBank":
        """Merged into the most similar slot, or put into an empty one, or in place of the one that scores least."""
        similar_B, nearest_B = self._similarity(key_BHD).max(1)
        # An empty slot scores less than any other, and is taken first.
        lowest_B, weakest_B = self.score_BM.masked_fill(~self.filled_BM, -torch.inf).min(1)
        merged_B = wanted_B & (similar_B > threshold)
        placed_B = wanted_B & ~merged_B & (score_B > lowest_B)
        evicted_B = placed_B & (lowest_B > -torch.inf)
        index_B = torch.where(merged_B, nearest_B, weakest_B)
        old_mass_B = _row(self.mass_BM, index_B) * merged_B
        share_B = (1 / (old_mass_B + 1)).to(key_BHD.dtype)[:, None, None]
        old_score_B = torch.where(merged_B, _row(self.score_BM, index_B), score_B)
        changed_B = merged_B | placed_B
        kept_B = (~placed_B).to(self.usage_BM.dtype)

        def put(before: Tensor, now: Tensor) -> Tensor:
            here = (torch.arange(self.slots, device=index_B.device) == index_B[:, None]) & changed_B[:, None]
            here = here.view(*here.shape, *[1] * (before.ndim - 2))
            return torch.where(here, now.to(before.dtype).unsqueeze(1), before)

        return SlotBank(
            put(self.key_BMHD, torch.lerp(_row(self.key_BMHD, index_B), key_BHD, share_B)),
            put(self.value_BMHD, torch.lerp(_row(self.value_BMHD, index_B), value_BHD, share_B)),
            put(self.score_BM, torch.maximum(old_score_B, score_B)),
            put(self.mass_BM, old_mass_B + 1),
            put(self.usage_BM, _row(self.usage_BM, index_B) * kept_B),
            put(self.age_BM, _row(self.age_BM, index_B) * kept_B),
            self.writes_B + placed_B,
            self.merges_B + merged_B,
            self.evictions_B + evicted_B,
        )

    def _similarity(self, key_BHD: Tensor) -> Tensor:
        """Cosines (B, M) over the keys of all heads together; less than any where a slot is empty."""
        cosine = F.cosine_similarity(self.key_BMHD.flatten(2).float(), key_BHD.flatten(1).float().unsqueeze(1), dim=-1)
        return cosine.masked_fill(~self.filled_BM, -torch.inf)

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

    def where(self, chosen_B: Tensor, other: "SlotBank") -> "SlotBank":
        """This bank for the chosen sequences, the other for the rest."""

        def pick(name: str) -> Tensor:
            one, two = getattr(self, name), getattr(other, name)
            return torch.where(chosen_B.view(-1, *[1] * (one.ndim - 1)), one, two)

        return SlotBank(**{f.name: pick(f.name) for f in fields(self)})


def taken(tensor_BL: Tensor, rows_BC: Tensor) -> Tensor:
    """Several rows of each sequence's second dimension."""
    return tensor_BL[torch.arange(len(rows_BC), device=rows_BC.device)[:, None], rows_BC]


def _row(tensor: Tensor, index_B: Tensor) -> Tensor:
    """Row `index` of each sequence's second dimension."""
    return tensor[torch.arange(len(index_B), device=index_B.device), index_B]
