"""Window attention of tokens that are already ordered by window, with PyTorch's fused attention, for inference.

All other operations of a transformer block work on each token separately, so tokens can stay in this order, and no
attention layer has to roll the image or partition it into windows. Shifted windows are another order of the same
tokens. As in `sdpa.py`, shifted windows have four kinds of masks, and windows of one kind are contiguous.

M: tokens of all images, C: channels, H: heads, N: tokens per window.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.window_attention.constant import constant
from redline.ops.window_attention.sdpa import edge_mask

ImageGrid = tuple[int, int, int]  # number of images, and their height and width in tokens


def attention_in_windows(
    qkv_M3C: Tensor, bias_HNN: Tensor, image: ImageGrid, shift: int = 0, scale: float | None = None
) -> Tensor:
    """Returns the attention of tokens in `window_order` for this shift, (M, C) in the same order."""
    heads, tokens, _ = bias_HNN.shape
    window = round(tokens**0.5)
    split = qkv_M3C.view(-1, tokens, 3, heads, qkv_M3C.shape[1] // 3 // heads)
    mixed: list[Tensor] = []
    start = 0
    for count, last_row, last_column in _kinds(image, window, shift):
        query, key, value = split[start : start + count].permute(2, 0, 3, 1, 4).unbind(0)
        start, bias = start + count, bias_HNN
        if last_row or last_column:
            bias = bias + edge_mask(window, shift, last_row, last_column, bias.device, bias.dtype)
        mixed.append(F.scaled_dot_product_attention(query, key, value, bias[None], scale=scale).transpose(1, 2))
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).reshape(len(qkv_M3C), -1)


@constant
def window_order(
    batch: int, height: int, width: int, window: int, shift: int = 0, device: torch.device | None = None
) -> Tensor:
    """Returns the index of the token at each position of the window order, (M,)."""
    tokens = torch.arange(batch * height * width, device=device).view(batch, height, width)
    rolled = tokens.roll((-shift, -shift), (1, 2))
    edge = (slice(0, None),) if not shift else (slice(0, -window), slice(-window, None))
    return torch.cat([_by_window(rolled[:, rows, columns], window) for rows in edge for columns in edge])


@constant
def image_order(
    batch: int, height: int, width: int, window: int, shift: int = 0, device: torch.device | None = None
) -> Tensor:
    """Returns the position of each token in the window order, (M,), which is the inverse of `window_order`."""
    return window_order(batch, height, width, window, shift, device).argsort()


@constant
def reordering(
    batch: int, height: int, width: int, window: int, before: int, after: int, device: torch.device | None = None
) -> Tensor:
    """Returns the permutation from the window order of shift `before` to that of shift `after`, (M,)."""
    return image_order(batch, height, width, window, before, device)[
        window_order(batch, height, width, window, after, device)
    ]


def _by_window(tokens_BHW: Tensor, window: int) -> Tensor:
    batch, height, width = tokens_BHW.shape
    return tokens_BHW.reshape(batch, height // window, window, width // window, window).transpose(2, 3).flatten()


def _kinds(image: ImageGrid, window: int, shift: int) -> list[tuple[int, bool, bool]]:
    """Returns the number of windows of each kind, and whether they are in the last row and in the last column."""
    batch, rows, columns = image[0], image[1] // window, image[2] // window
    if not shift:
        return [(batch * rows * columns, False, False)]
    kinds = [
        (batch * (1 if last_row else rows - 1) * (1 if last_column else columns - 1), last_row, last_column)
        for last_row in (False, True)
        for last_column in (False, True)
    ]
    return [kind for kind in kinds if kind[0]]
