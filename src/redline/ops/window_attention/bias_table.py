"""The bias table as kernels read it: neighbouring keys' biases lie behind each other."""

import torch
from torch import Tensor


def expand_bias_table(table_RH: Tensor, window: int) -> Tensor:
    """By head, sum of rows, column of the query, and column of the key: (heads, 2·window − 1, window, window)."""
    offsets = 2 * window - 1
    return table_RH.unflatten(0, (offsets, offsets)).unfold(1, window, 1).permute(2, 0, 1, 3).contiguous()


def compact_bias_table(bias_HRWW: Tensor) -> Tensor:
    """The table that was spread: the first query's columns, and what the last one's have beyond them."""
    first, last = bias_HRWW[:, :, 0], bias_HRWW[:, :, -1, 1:]
    return torch.cat((first, last), -1).flatten(1).t()
