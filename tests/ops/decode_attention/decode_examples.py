"""Rings in every state: empty, part full, just full, wrapped, and what stands where nothing is held."""

import torch
from torch import Tensor


def example(
    ring: int, lengths: list[int], heads: int, groups: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """q, k, v as slices of one product; places that hold nothing are NaN, since nobody may look at them."""
    rows, places = len(lengths), ring + 5
    qkv = torch.randn(rows, heads + 2 * groups, dim, dtype=dtype, device=device)
    q, k, v = qkv.split([heads, groups, groups], dim=1)
    keys, values = (torch.randn(rows, places, groups, dim, dtype=dtype, device=device) for _ in range(2))
    for row, length in enumerate(lengths):
        keys[row, min(length, ring) :] = values[row, min(length, ring) :] = float("nan")
    return q, k, v, keys, values, torch.tensor(lengths, device=device)
