"""LayerNorm, then dropout, then ReLU: the specification, with random numbers that every implementation can repeat.

The number of an element follows from the seed and from where it stands: columns 4·i to 4·i + 3 of row r take the four
words of Philox 4×32-10 for the counter (i, r, 0, 0). So no mask is stored, and the backward pass makes it anew. An
element is dropped when its word without the last bit is less than p · 2³¹: whole numbers, so that all agree.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 0xFFFFFFFF


def layer_norm_dropout_relu(x: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float, seed: Tensor) -> Tensor:
    """Statistics and all that follows are fp32 (fp64 for fp64 input), rounded once; `seed` is one int64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    if p:
        rows = x.numel() // max(1, x.shape[-1])
        kept = keep_mask(seed, rows, x.shape[-1], p).view(x.shape)
        normed = torch.where(kept, normed / (1 - p), 0.0)
    return normed.relu().to(x.dtype)


def keep_mask(seed: Tensor, rows: int, width: int, p: float) -> Tensor:
    """True for what dropout leaves, (rows, width)."""
    columns = torch.arange((width + 3) // 4, device=seed.device)
    row = torch.arange(rows, device=seed.device)[:, None]
    words = torch.stack(philox(seed, columns.expand(rows, -1), row.expand(-1, len(columns))), -1)
    return (words >> 1).flatten(1)[:, :width] >= threshold(p)


def threshold(p: float) -> int:
    """What half a word must reach to be kept."""
    return min(round(p * 2**31), 2**31 - 1)


def philox(seed: Tensor, counter_0: Tensor, counter_1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4×32-10 (Salmon et al., 2011) in int64: four words of 32 bits for each counter (c0, c1, 0, 0)."""
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    zero = torch.zeros_like(counter_0)
    words = (counter_0 & _WORD, counter_1 & _WORD, zero, zero)
    for _ in range(10):
        # A product's 64 bits are right whatever its sign, and so are both halves once the sign is masked off.
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        high_a, high_b = (a >> 32) & _WORD, (b >> 32) & _WORD
        words = (high_b ^ words[1] ^ key_0, b & _WORD, high_a ^ words[3] ^ key_1, a & _WORD)
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return words
