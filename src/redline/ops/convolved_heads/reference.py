"""Reference of a short causal convolution per channel, SiLU, and normalization of queries and keys.

B: sequences, S: tokens, C: channels, T: taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def convolved(x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """Returns each channel's convolution over a token (last tap) and the tokens before it in its document."""
    length, count = x_BSC.shape[1], len(taps_TC)
    padded = torch.cat((recent_BTC.to(x_BSC.dtype), x_BSC), 1)
    total = x_BSC * taps_TC[-1]
    if documents_BS is not None:
        first = documents_BS[:, :1].expand(-1, count - 1)
        documents_BS = torch.cat((first, documents_BS), 1)
    for back in range(1, count):
        begin = count - 1 - back
        term = padded[:, begin : begin + length] * taps_TC[-1 - back]
        if documents_BS is not None:
            same = documents_BS[:, begin : begin + length] == documents_BS[:, count - 1 :]
            term = term * same.unsqueeze(-1)
        total = total + term
    return total


def convolved_heads(
    x_BSC: Tensor,
    taps_TC: Tensor,
    recent_BTC: Tensor,
    heads: int,
    key_dim: int,
    documents_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mixed = F.silu(convolved(x_BSC, taps_TC, recent_BTC, documents_BS))
    keys = heads * key_dim
    sizes = [keys, keys, mixed.shape[-1] - 2 * keys]
    query, key, value = (one.unflatten(-1, (heads, -1)) for one in mixed.split(sizes, -1))
    return F.normalize(query, dim=-1), F.normalize(key, dim=-1), value
