"""Window attention with a learned bias by relative position, as Swin defined it: the specification.

Shapes: B pictures of H × W tokens, windows of `window` × `window` tokens (N of them), `heads` heads of D channels.
`qkv_BHW3C` holds queries, keys and values behind each other; `table_RH` holds one bias for every head and each of the
(2·window − 1)² offsets between two tokens of a window. With a shift, windows start `shift` tokens further down and
right and wrap around the picture's end; tokens that meet only through the wrapping do not see each other.
"""

import torch
from torch import Tensor

from redline.ops.window_attention.constant import constant

# What the original adds between tokens that must not see each other. It is not minus infinity, and the
# softmax of weights far from usual could tell: the value is part of the specification.
MASKED = -100.0


def window_attention(qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0) -> Tensor:
    """Attention inside each window; gives (B, H, W, C). H and W are multiples of the window."""
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
    """The bias of every pair of tokens in a window, (heads, N, N)."""
    return table_RH[relative_index(window, table_RH.device)].permute(2, 0, 1)


@constant
def relative_index(window: int, device: torch.device) -> Tensor:
    """Which row of the table belongs to each pair of tokens, (N, N)."""
    position = torch.arange(window, device=device)
    down = position[:, None] - position[None, :] + window - 1
    pairs = down[:, None, :, None] * (2 * window - 1) + down[None, :, None, :]
    return pairs.reshape(window * window, window * window)


@constant
def shift_mask(height: int, width: int, window: int, shift: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What keeps tokens apart that only the wrapping brings together, (rows, columns, 1, N, N)."""
    region = _side(height, window, shift, device)[:, None] * 3 + _side(width, window, shift, device)[None, :]
    windows = region.reshape(height // window, window, width // window, window).transpose(1, 2).flatten(2)
    apart = windows[..., :, None] != windows[..., None, :]
    return (apart * MASKED).to(dtype)[:, :, None]


def _side(length: int, window: int, shift: int, device: torch.device) -> Tensor:
    """0 before the last window, then 1, and 2 for what was wrapped around, along one side of the rolled picture."""
    position = torch.arange(length, device=device)
    return (position >= length - window).long() + (position >= length - shift).long()
