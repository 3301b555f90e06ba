"""The layout of the bias table that the kernels read, in which the biases of neighboring keys are contiguous.

R: rows of the bias table, H: heads, W: window.
"""

import torch
from torch import Tensor


def expand_bias_table(table_RH: Tensor, window: int) -> Tensor:
    """Returns (heads, 2·window − 1, window, window) by head, row offset, query column and key column."""
    offsets = 2 * window - 1
    return table_RH.unflatten(0, (offsets, offsets)).unfold(1, window, 1).permute(2, 0, 1, 3).contiguous()


def compact_bias_table(bias_HRWW: Tensor) -> Tensor:
    """Inverts `expand_bias_table`: takes the first query column, and what the last query column adds to it."""
    first, last = bias_HRWW[:, :, 0], bias_HRWW[:, :, -1, 1:]
    return torch.cat((first, last), -1).flatten(1).t()
