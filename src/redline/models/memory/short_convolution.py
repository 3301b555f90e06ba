"""A causal convolution over the last few tokens, each channel for itself: what a token says together with those before.

Shapes: B sequences of S tokens, C channels, T taps.
"""

import torch
from torch import Tensor, nn


def new_taps(count: int, channels: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, channels).uniform_(-(count**-0.5), count**-0.5))


def short_convolution(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum over the last tokens, its own the last; gives what the next tokens need as well."""
    length, count = x_BSC.shape[1], len(taps_TC)
    padded = torch.cat((recent_BTC.to(x_BSC.dtype), x_BSC), 1)
    total = x_BSC * taps_TC[-1]
    if documents_BS is not None:
        first = documents_BS[:, :1].expand(-1, count - 1)
        documents_BS = torch.cat((first, documents_BS), 1)
    for back in range(1, count):
        begin = count - 1 - back
        term = padded[:, begin : begin + length] * taps_TC[-1 - back]
        if documents_BS is not None:
            same = documents_BS[:, begin : begin + length] == documents_BS[:, count - 1 :]
            term = term * same.unsqueeze(-1)
        total = total + term
    # A view would keep all of these tokens alive for as long as the state is.
    recent = padded[:, length:].clone() if length > 1 else padded[:, length:]
    if documents_BS is not None:
        recent = recent * (documents_BS[:, length:] == documents_BS[:, -1:]).unsqueeze(-1)
    return total, recent
