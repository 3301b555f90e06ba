"""Reference of rotary position embedding, in the rotate-half convention of Hugging Face.

B: sequences, S: tokens or positions, H: heads, D: head dimension. Channels i and i + D/2 are rotated by the angle whose
cosine and sine are in column i of the tables. Computed in fp32 (fp64 for fp64 input).
"""

import torch
from torch import Tensor


def rope(
    q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, positions_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows = slice(q_BSHD.shape[1]) if positions_BS is None else positions_BS
    cos, sin = cos_SD[rows].unsqueeze(-2), sin_SD[rows].unsqueeze(-2)
    return _rotate(q_BSHD, cos, sin), _rotate(k_BSHD, cos, sin)


def _rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x_BSHD.dtype, torch.float32)
    first, second = x_BSHD.to(wide).chunk(2, -1)
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSHD.dtype)
