"""Random banks and tokens, and a simple implementation of the op that rebuilds the bank for every token in fp32."""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.slot_write import Slots, Written

Offered = tuple[Tensor, Tensor, Tensor, Tensor]
Sizes = tuple[int, int, int, int, int]


def example(
    batch: int, slots: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, filled: float, device: str = "cpu"
) -> tuple[Slots, Offered]:
    """Returns keys near few directions, so that many are similar, and tokens with descending scores."""
    number = torch.promote_types(dtype, torch.float32)
    directions = torch.randn(2 * slots, heads * dim)

    def keys(count: int) -> Tensor:
        near = directions[torch.randint(len(directions), (batch, count))] + 0.3 * torch.randn(batch, count, heads * dim)
        return near.unflatten(-1, (heads, dim)).to(device, dtype)

    def values(count: int) -> Tensor:
        return torch.randn(batch, count, heads, dim).to(device, dtype)

    is_filled = torch.rand(batch, slots) < filled
    mass = torch.randint(1, 5, (batch, slots)) * is_filled
    scalars = [torch.randn(batch, slots) * is_filled, mass, torch.rand(batch, slots), 100 * torch.rand(batch, slots)]
    held = (keys(slots), values(slots), *(one.to(device, number) for one in scalars))
    score = torch.randn(batch, tokens).sort(dim=1, descending=True).values.to(device, number)
    return Slots(*held), (keys(tokens), values(tokens), score, (torch.rand(batch, tokens) < 0.9).to(device))


def one_by_one(slots: Slots, offered: Offered, threshold: float) -> tuple[Slots, Written]:
    keys, values, scores, wanted = offered
    counts = [torch.zeros(len(scores), dtype=torch.int64, device=scores.device) for _ in range(3)]
    for token in range(scores.shape[1]):
        given = (keys[:, token], values[:, token], scores[:, token], wanted[:, token])
        slots, became = _with_one(slots, *given, threshold)
        counts = [count + one for count, one in zip(counts, became, strict=True)]
    return slots, Written(*counts)


def _with_one(
    slots: Slots, key_BHD: Tensor, value_BHD: Tensor, score_B: Tensor, wanted_B: Tensor, threshold: float
) -> tuple[Slots, tuple[Tensor, Tensor, Tensor]]:
    filled_BM = slots.mass_BM > 0
    cosine = F.cosine_similarity(slots.key_BMHD.flatten(2).float(), key_BHD.flatten(1).float().unsqueeze(1), dim=-1)
    similar_B, nearest_B = cosine.masked_fill(~filled_BM, -torch.inf).max(1)
    lowest_B, weakest_B = slots.score_BM.masked_fill(~filled_BM, -torch.inf).min(1)
    merged_B = wanted_B & (similar_B > threshold)
    placed_B = wanted_B & ~merged_B & (score_B > lowest_B)
    index_B = torch.where(merged_B, nearest_B, weakest_B)
    old_mass_B = _row(slots.mass_BM, index_B) * merged_B
    share_B = (1 / (old_mass_B + 1)).to(key_BHD.dtype)[:, None, None]
    old_score_B = torch.where(merged_B, _row(slots.score_BM, index_B), score_B)
    changed_B = merged_B | placed_B
    kept_B = (~placed_B).to(slots.usage_BM.dtype)

    def put(before: Tensor, now: Tensor) -> Tensor:
        here = torch.arange(before.shape[1], device=index_B.device) == index_B[:, None]
        here = (here & changed_B[:, None]).view(*here.shape, *[1] * (before.ndim - 2))
        return torch.where(here, now.to(before.dtype).unsqueeze(1), before)

    after = Slots(
        put(slots.key_BMHD, torch.lerp(_row(slots.key_BMHD, index_B), key_BHD, share_B)),
        put(slots.value_BMHD, torch.lerp(_row(slots.value_BMHD, index_B), value_BHD, share_B)),
        put(slots.score_BM, torch.maximum(old_score_B, score_B)),
        put(slots.mass_BM, old_mass_B + 1),
        put(slots.usage_BM, _row(slots.usage_BM, index_B) * kept_B),
        put(slots.age_BM, _row(slots.age_BM, index_B) * kept_B),
    )
    return after, (placed_B, merged_B, placed_B & (lowest_B > -torch.inf))


def _row(tensor: Tensor, index_B: Tensor) -> Tensor:
    return tensor[torch.arange(len(index_B), device=index_B.device), index_B]
