"""Reference of writing tokens into a bank of slots, one after the other.

If the largest cosine of the token's key with a slot's key, over all heads, exceeds the threshold, the token is merged
into that slot: key and value become means weighted by mass, and the score the larger of the two. Otherwise the token
fills an empty slot, or replaces the slot with the lowest score if that score is lower than the token's. Each write
depends on the previous ones, so the tokens cannot be processed in parallel.

B: sequences, M: slots, C: tokens, H: heads, D: channels, N: channels of all heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Slots(NamedTuple):
    """The contents of a bank. A slot with mass 0 is empty; usage and age are reset to 0 when a token fills a slot."""

    key_BMHD: Tensor
    value_BMHD: Tensor
    score_BM: Tensor
    mass_BM: Tensor
    usage_BM: Tensor
    age_BM: Tensor


class Written(NamedTuple):
    """Counts the written tokens of each sequence.

    `placed_B` counts the tokens that filled an empty slot or replaced the contents of a slot, `merged_B` the tokens
    that were merged into a slot, and `evicted_B` those of `placed_B` that replaced the contents of a slot.
    """

    placed_B: Tensor
    merged_B: Tensor
    evicted_B: Tensor


def slot_write(
    slots: Slots, key_BCHD: Tensor, value_BCHD: Tensor, score_BC: Tensor, wanted_BC: Tensor, threshold: float
) -> tuple[Slots, Written]:
    after = Slots(*(tensor.clone() for tensor in slots))
    batch, count = score_BC.shape
    rows_B = torch.arange(batch, device=score_BC.device)
    # Empty slots count as having a score and cosines of -inf.
    filled_BM = after.mass_BM > 0
    standing_BM = after.score_BM.masked_fill(~filled_BM, -torch.inf)
    unit_BCN = _unit(key_BCHD)
    cosine_BMC = (_unit(after.key_BMHD) @ unit_BCN.mT).masked_fill(~filled_BM[:, :, None], -torch.inf)
    written = torch.zeros(3, batch, dtype=torch.int64, device=score_BC.device)
    for token in range(count):
        key_BHD, value_BHD, score_B = key_BCHD[:, token], value_BCHD[:, token], score_BC[:, token]
        similar_B, nearest_B = cosine_BMC[:, :, token].max(1)
        lowest_B, weakest_B = standing_BM.min(1)
        merged_B = wanted_BC[:, token] & (similar_B > threshold)
        placed_B = wanted_BC[:, token] & ~merged_B & (score_B > lowest_B)
        written += torch.stack((placed_B, merged_B, placed_B & (lowest_B > -torch.inf)))
        place = rows_B, torch.where(merged_B, nearest_B, weakest_B)
        mass_B = after.mass_BM[place]
        old_mass_B = mass_B * merged_B
        share_B11 = (1 / (old_mass_B + 1)).to(key_BCHD.dtype)[:, None, None]
        changed_B = merged_B | placed_B
        old_key, old_value, old_score_B = (tensor[place] for tensor in after[:3])
        changed_B11, new_score_B = (
            changed_B[:, None, None],
            torch.where(placed_B, score_B, old_score_B.maximum(score_B)),
        )
        after.key_BMHD[place] = torch.where(changed_B11, torch.lerp(old_key, key_BHD, share_B11), old_key)
        after.value_BMHD[place] = torch.where(changed_B11, torch.lerp(old_value, value_BHD, share_B11), old_value)
        after.score_BM[place] = torch.where(changed_B, new_score_B, old_score_B)
        after.mass_BM[place] = torch.where(changed_B, old_mass_B + 1, mass_B)
        for tensor in (after.usage_BM, after.age_BM):
            tensor[place] = tensor[place].masked_fill(placed_B, 0)
        standing_BM[place] = torch.where(changed_B, new_score_B, standing_BM[place]).detach()
        like_BC = (unit_BCN @ _unit(after.key_BMHD[place].unsqueeze(1)).mT).squeeze(-1)
        cosine_BMC[place] = torch.where(changed_B[:, None], like_BC, cosine_BMC[place])
    return after, Written(*written)


def _unit(key_BLHD: Tensor) -> Tensor:
    """Returns the keys of all heads normalized to unit length, without gradient, in fp64, which no TF32 flag rounds."""
    return F.normalize(key_BLHD.detach().flatten(2).double(), dim=-1, eps=1e-8)
