"""Rows of every kind in one step, with NaN wherever nothing is stored."""

import random

import torch
from torch import Tensor

from redline.ops.paged_attention import PagedRows


def example(
    counts: list[int],
    lengths: list[int],
    heads: int,
    groups: int,
    dim: int,
    dtype: torch.dtype,
    size: int = 16,
    padding: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, PagedRows]:
    """Returns q, k and v as slices of one projection, the pages, and rows that share no page."""
    choice, tokens = random.Random(0), sum(counts) + padding
    qkv = torch.randn(tokens, heads + 2 * groups, dim, dtype=dtype, device=device)
    q, k, v = qkv.split([heads, groups, groups], dim=1)
    needed = [-(-(count + length) // size) for count, length in zip(counts, lengths, strict=True)]
    free = choice.sample(range(sum(needed) + 3), sum(needed))
    keys, values = (
        torch.full((sum(needed) + 3, size, groups, dim), float("nan"), dtype=dtype, device=device) for _ in "kv"
    )
    tables = torch.zeros(len(counts), max(needed), dtype=torch.int32)
    slots = []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        pages = [free.pop() for _ in range(needed[row])]
        tables[row, : len(pages)] = torch.tensor(pages)
        at = [pages[place // size] * size + place % size for place in range(length + count)]
        slots += at[length:]
        for held in (keys, values):
            held.flatten(0, 1)[at[:length]] = torch.randn(length, groups, dim, dtype=dtype, device=device)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    slots_T = torch.tensor([*slots, *[-1] * padding], dtype=torch.int32, device=device)
    numbers = (slots_T, starts, torch.tensor(lengths, dtype=torch.int32, device=device), tables.to(device))
    singles = next((row for row, count in enumerate(counts) if count > 1), len(counts))
    return q, k, v, keys, values, PagedRows(*numbers, singles=singles)
