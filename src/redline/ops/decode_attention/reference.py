"""Reference of the attention of one new token per sequence over a ring buffer of keys and values.

B: sequences, C: positions in the buffer, of which the first `ring` are the ring, H: query heads, G: key and value
heads, D: head dimension. Token n of a sequence is stored at position n mod ring, so the new token replaces the oldest
one when the ring is full. Computed in fp32 (fp64 for fp64 input).
"""

import torch
from torch import Tensor


def decode_attention(
    q_BHD: Tensor, k_BGD: Tensor, v_BGD: Tensor, keys_BCGD: Tensor, values_BCGD: Tensor, lengths_B: Tensor, ring: int
) -> Tensor:
    rows = torch.arange(len(lengths_B), device=lengths_B.device)
    place = lengths_B % ring
    keys_BCGD[rows, place] = k_BGD
    values_BCGD[rows, place] = v_BGD
    wide = torch.promote_types(q_BHD.dtype, torch.float32)
    q_BGRD = q_BHD.unflatten(1, (k_BGD.shape[1], -1)).to(wide)
    keys, values = keys_BCGD[:, :ring].to(wide), values_BCGD[:, :ring].to(wide)
    scores_BGRC = torch.einsum("bgrd,bcgd->bgrc", q_BGRD, keys) * q_BHD.shape[-1] ** -0.5
    held_BC = torch.arange(ring, device=lengths_B.device) <= lengths_B[:, None]
    weights = scores_BGRC.masked_fill(~held_BC[:, None, None], float("-inf")).softmax(-1)
    # Positions without a token are uninitialized: they may hold NaN, and their weight of 0 times NaN would be NaN.
    values = torch.where(held_BC[:, :, None, None], values, 0)
    return torch.einsum("bgrc,bcgd->bgrd", weights, values).flatten(1, 2).to(q_BHD.dtype)
