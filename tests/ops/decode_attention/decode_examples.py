"""Rings in every state: empty, partly full, just full and wrapped, with NaN in unused positions."""

import torch
from torch import Tensor


def example(
    ring: int, lengths: list[int], heads: int, groups: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Returns q, k and v as slices of one projection, and a ring whose unused positions are NaN."""
    rows, places = len(lengths), ring + 5
    qkv = torch.randn(rows, heads + 2 * groups, dim, dtype=dtype, device=device)
    q, k, v = qkv.split([heads, groups, groups], dim=1)
    keys, values = (torch.randn(rows, places, groups, dim, dtype=dtype, device=device) for _ in range(2))
    for row, length in enumerate(lengths):
        keys[row, min(length, ring) :] = values[row, min(length, ring) :] = float("nan")
    return q, k, v, keys, values, torch.tensor(lengths, device=device)
