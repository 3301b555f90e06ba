"""Reference of LayerNorm, dropout and ReLU, with a random generator that every implementation reproduces.

The random word of an element depends only on the seed and the element's index: columns 4·i to 4·i + 3 of row r use the
four words of Philox 4×32-10 for the counter (i, r, 0, 0). So no mask is stored, and the backward pass recomputes it. An
element is dropped if its word, shifted right by one bit, is less than p · 2³¹. The comparison is between integers, so
all implementations agree.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 0xFFFFFFFF


def layer_norm_dropout_relu(x: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float, seed: Tensor) -> Tensor:
    """Computes in fp32 (fp64 for fp64 input) and rounds once. `seed` is one int64 element."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    if p:
        rows = x.numel() // max(1, x.shape[-1])
        kept = keep_mask(seed, rows, x.shape[-1], p).view(x.shape)
        normed = torch.where(kept, normed / (1 - p), 0.0)
    return normed.relu().to(x.dtype)


def keep_mask(seed: Tensor, rows: int, width: int, p: float) -> Tensor:
    """Returns the dropout mask (rows, width), True for elements that are kept."""
    columns = torch.arange((width + 3) // 4, device=seed.device)
    row = torch.arange(rows, device=seed.device)[:, None]
    words = torch.stack(philox(seed, columns.expand(rows, -1), row.expand(-1, len(columns))), -1)
    return (words >> 1).flatten(1)[:, :width] >= threshold(p)


def threshold(p: float) -> int:
    """Returns the smallest random word, after its shift to 31 bits, for which an element is kept."""
    return min(round(p * 2**31), 2**31 - 1)


def philox(seed: Tensor, counter_0: Tensor, counter_1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four words of Philox 4×32-10 (Salmon et al., 2011) for each counter (c0, c1, 0, 0), as int64."""
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    zero = torch.zeros_like(counter_0)
    words = (counter_0 & _WORD, counter_1 & _WORD, zero, zero)
    for _ in range(10):
        # Overflow keeps the low 64 bits of the product exact, and masking removes the sign of the high word.
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        high_a, high_b = (a >> 32) & _WORD, (b >> 32) & _WORD
        words = (high_b ^ words[1] ^ key_0, b & _WORD, high_a ^ words[3] ^ key_1, a & _WORD)
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return words
