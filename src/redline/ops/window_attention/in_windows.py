"""Window attention of rows that already stand window by window, through torch's own fused attention; for inference.

Everything else in a transformer's block works on each token by itself, so that rows can stay in this order: nothing is
rolled or cut into windows, and back, around each attention. Shifted windows are another order of the same rows. As in
`sdpa.py`, there are four kinds of them by the edges they lie at, and those of one kind stand together.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.window_attention.constant import constant
from redline.ops.window_attention.sdpa import edge_mask

ImageGrid = tuple[int, int, int]  # pictures, and the tokens of their height and width


def attention_in_windows(
    qkv_M3C: Tensor, bias_HNN: Tensor, picture: ImageGrid, shift: int = 0, scale: float | None = None
) -> Tensor:
    """Attention of rows in `window_order` for this shift; gives (M, C) in the same order."""
    heads, tokens, _ = bias_HNN.shape
    window = round(tokens**0.5)
    split = qkv_M3C.view(-1, tokens, 3, heads, qkv_M3C.shape[1] // 3 // heads)
    mixed: list[Tensor] = []
    start = 0
    for count, last_row, last_column in _kinds(picture, window, shift):
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
    """Which token of the pictures stands in each row, window by window, (M,)."""
    tokens = torch.arange(batch * height * width, device=device).view(batch, height, width)
    rolled = tokens.roll((-shift, -shift), (1, 2))
    edge = (slice(0, None),) if not shift else (slice(0, -window), slice(-window, None))
    return torch.cat([_by_window(rolled[:, rows, columns], window) for rows in edge for columns in edge])


@constant
def image_order(
    batch: int, height: int, width: int, window: int, shift: int = 0, device: torch.device | None = None
) -> Tensor:
    """Which row each token of the pictures stands in, (M,): the way back."""
    return window_order(batch, height, width, window, shift, device).argsort()


@constant
def reordering(
    batch: int, height: int, width: int, window: int, before: int, after: int, device: torch.device | None = None
) -> Tensor:
    """Which row in the order of one shift stands in each row in the order of another, (M,)."""
    return image_order(batch, height, width, window, before, device)[
        window_order(batch, height, width, window, after, device)
    ]


def _by_window(tokens_BHW: Tensor, window: int) -> Tensor:
    batch, height, width = tokens_BHW.shape
    return tokens_BHW.reshape(batch, height // window, window, width // window, window).transpose(2, 3).flatten()


def _kinds(picture: ImageGrid, window: int, shift: int) -> list[tuple[int, bool, bool]]:
    """How many windows of each kind there are, and whether they are in the last row and column, as they stand."""
    batch, rows, columns = picture[0], picture[1] // window, picture[2] // window
    if not shift:
        return [(batch * rows * columns, False, False)]
    kinds = [
        (batch * (1 if last_row else rows - 1) * (1 if last_column else columns - 1), last_row, last_column)
        for last_row in (False, True)
        for last_column in (False, True)
    ]
    return [kind for kind in kinds if kind[0]]
