"""A causal depthwise convolution over the last few tokens.

Shapes: B sequences of S tokens, C channels, T taps.
"""

import torch
from torch import Tensor, nn

from redline.ops.convolved_heads.reference import convolved


def new_taps(count: int, channels: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, channels).uniform_(-(count**-0.5), count**-0.5))


def short_convolution(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the convolution's output and the inputs that it needs again for the next tokens."""
    return convolved(x_BSC, taps_TC, recent_BTC, documents_BS), next_inputs(x_BSC, recent_BTC, documents_BS)


def next_inputs(x_BSC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """Returns the last inputs, which the convolution of the next tokens needs; zeros for earlier documents."""
    (length, count), recent_BTC = (x_BSC.shape[1], recent_BTC.shape[1]), recent_BTC.to(x_BSC.dtype)
    # A copy, because a view would keep the activations of all tokens alive as long as the state.
    held = torch.cat((recent_BTC[:, length:], x_BSC[:, max(0, length - count) :]), 1)
    if documents_BS is None:
        return held
    documents_BS = torch.cat((documents_BS[:, :1].expand(-1, count), documents_BS), 1)
    return held * (documents_BS[:, length:] == documents_BS[:, -1:]).unsqueeze(-1)
