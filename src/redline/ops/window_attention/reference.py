"""Reference of the window attention of Swin transformers, with a learned relative position bias.

B: images, H and W: height and width in tokens (H: heads in `table_RH`), C: channels, N: tokens per window, D: head
dimension, R: the (2·window − 1)² relative positions of two tokens of a window. `qkv_BHW3C` holds queries, keys and
values in this order. With a shift, windows start `shift` tokens further down and to the right and wrap around the
image; tokens that are neighbors only through the wrapping do not attend to each other.
"""

import torch
from torch import Tensor

from redline.ops.window_attention.constant import constant

# Swin adds this value, not -inf, to the scores of tokens that must not attend to each other. Unusual weights could make
# the difference visible, so the value is part of the specification.
MASKED = -100.0


def window_attention(qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0) -> Tensor:
    """Returns the attention inside each window, (B, H, W, C). H and W must be multiples of the window."""
    batch, height, width, channels = qkv_BHW3C.shape
    heads = table_RH.shape[1]
    if shift:
        qkv_BHW3C = qkv_BHW3C.roll((-shift, -shift), (1, 2))
    rows, columns = height // window, width // window
    split = qkv_BHW3C.reshape(batch, rows, window, columns, window, 3, heads, channels // 3 // heads)
    query, key, value = split.permute(5, 0, 1, 3, 6, 2, 4, 7).flatten(5, 6).unbind(0)  # (B, rows, columns, heads, N, D)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + relative_bias(table_RH, window)
    if shift:
        scores = scores + shift_mask(height, width, window, shift, scores.device, scores.dtype)
    mixed = (scores.softmax(-1) @ value).unflatten(4, (window, window))
    output = mixed.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, height, width, channels // 3)
    return output.roll((shift, shift), (1, 2)) if shift else output


def relative_bias(table_RH: Tensor, window: int) -> Tensor:
    """Returns the bias of every pair of tokens in a window, (heads, N, N)."""
    return table_RH[relative_index(window, table_RH.device)].permute(2, 0, 1)


@constant
def relative_index(window: int, device: torch.device) -> Tensor:
    """Returns the row of the bias table for each pair of tokens, (N, N)."""
    position = torch.arange(window, device=device)
    down = position[:, None] - position[None, :] + window - 1
    pairs = down[:, None, :, None] * (2 * window - 1) + down[None, :, None, :]
    return pairs.reshape(window * window, window * window)


@constant
def shift_mask(height: int, width: int, window: int, shift: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the additive mask between tokens that are neighbors only by wrapping, (rows, columns, 1, N, N)."""
    region = _side(height, window, shift, device)[:, None] * 3 + _side(width, window, shift, device)[None, :]
    windows = region.reshape(height // window, window, width // window, window).transpose(1, 2).flatten(2)
    apart = windows[..., :, None] != windows[..., None, :]
    return (apart * MASKED).to(dtype)[:, :, None]


def _side(length: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Returns each position's region on a side of the rolled image: 0 before the last window, 1 in it, 2 if wrapped."""
    position = torch.arange(length, device=device)
    return (position >= length - window).long() + (position >= length - shift).long()


def expand_bias_table(table_RH: Tensor, window: int) -> Tensor:
    """Returns the table in the layout of the kernels, in which the biases of neighboring keys are contiguous.

    The dimensions (heads, 2·window − 1, window, window) are head, row offset, query column and key column.
    """
    offsets = 2 * window - 1
    return table_RH.unflatten(0, (offsets, offsets)).unfold(1, window, 1).permute(2, 0, 1, 3).contiguous()


def compact_bias_table(bias_HRWW: Tensor) -> Tensor:
    """Inverts `expand_bias_table`, in which query column q and key column k have the column offset q + k.

    So the first query column holds the first `window` column offsets, and the last query column the remaining ones.
    """
    first, last = bias_HRWW[:, :, 0], bias_HRWW[:, :, -1, 1:]
    return torch.cat((first, last), -1).flatten(1).t()
