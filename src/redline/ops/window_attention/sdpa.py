"""Window attention with PyTorch's fused attention, which does not store all scores.

The bias is passed as the additive mask, and all windows share one mask. With a shift, windows in the last row and
column contain tokens that are neighbors only through the wrapping. So there are four kinds of windows (inner, last
column, last row, corner) with one mask each; a mask per window would be as large as the scores.

B: images, H and W: height and width in tokens, C: channels, N: tokens per window, R: rows of the bias table.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.window_attention.constant import constant
from redline.ops.window_attention.reference import MASKED, relative_index


def window_attention(qkv_BHW3C: Tensor, table_RH: Tensor, window: int, shift: int = 0) -> Tensor:
    """Computes the same as the reference."""
    height, width = qkv_BHW3C.shape[1:3]
    # Makes the mask contiguous per head, because the fused kernel reads such a mask faster.
    bias_HNN = table_RH.to(qkv_BHW3C.dtype).t()[:, relative_index(window, table_RH.device)]
    if not shift:
        return _attend(qkv_BHW3C, bias_HNN, window)
    rolled = qkv_BHW3C.roll((-shift, -shift), (1, 2))
    bands: list[Tensor] = []
    for last_row, rows in ((False, slice(0, height - window)), (True, slice(height - window, height))):
        parts: list[Tensor] = []
        for last_column, columns in ((False, slice(0, width - window)), (True, slice(width - window, width))):
            part, bias = rolled[:, rows, columns], bias_HNN
            if not part.numel():
                continue
            if last_row or last_column:
                bias = bias + edge_mask(window, shift, last_row, last_column, bias.device, bias.dtype)
            parts.append(_attend(part, bias, window))
        if parts:
            bands.append(torch.cat(parts, dim=2))
    return torch.cat(bands, dim=1).roll((shift, shift), (1, 2))


def _attend(part_BHW3C: Tensor, bias_HNN: Tensor, window: int) -> Tensor:
    """Computes the attention of windows that all have the same bias."""
    batch, height, width, channels = part_BHW3C.shape
    heads = bias_HNN.shape[0]
    rows, columns = height // window, width // window
    windows = part_BHW3C.reshape(batch, rows, window, columns, window, channels).transpose(2, 3)
    split = windows.reshape(batch * rows * columns, window * window, 3, heads, channels // 3 // heads)
    query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias_HNN[None])
    tokens = mixed.transpose(1, 2).reshape(batch, rows, columns, window, window, channels // 3)
    return tokens.transpose(2, 3).reshape(batch, height, width, channels // 3)


@constant
def edge_mask(
    window: int, shift: int, last_row: bool, last_column: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the additive mask of a window in the last row, the last column, or both, (N, N)."""
    wrapped = torch.arange(window, device=device) >= window - shift
    region = (wrapped[:, None] & last_row) * 2 + (wrapped[None, :] & last_column) * 1
    tokens = region.flatten()
    return ((tokens[:, None] != tokens[None, :]) * MASKED).to(dtype)
