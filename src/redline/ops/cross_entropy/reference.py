"""Reference of cross-entropy with label smoothing and z-loss.

N: rows, V: classes. With lse = log(sum(exp(logits))), label smoothing s and target t, the loss of a row is
lse − (1 − s) · logit_t − s · mean(logits) + z_loss · lse². It is computed and returned in fp32 (fp64 for fp64 logits),
because bf16 would keep only three digits of a loss.
"""

import torch
from torch import Tensor


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Returns the loss of each row, their sum, or their mean over the rows that are not ignored."""
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    classes = exact.shape[1]
    known = (target_N >= 0) & (target_N < classes)
    # Ignored rows must not contribute to any gradient, even if they contain NaN.
    exact = torch.where((target_N == ignore_index)[:, None], 0.0, exact)
    lse = exact.logsumexp(1)
    picked = exact.gather(1, torch.where(known, target_N, 0).long()[:, None])[:, 0]
    loss_N = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        loss_N = loss_N - label_smoothing * exact.mean(1)
    if z_loss:
        loss_N = loss_N + z_loss * lse.square()
    # Losses of invalid targets are multiplied by NaN, not replaced, so that their gradients are NaN too.
    ignored = target_N == ignore_index
    loss_N = loss_N * torch.where(known | ignored, 1.0, torch.nan).to(loss_N.dtype)
    return reduced(torch.where(ignored, 0.0, loss_N), target_N, ignore_index, reduction)


def reduced(loss_N: Tensor, target_N: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Applies the reduction. The number of rows that are not ignored stays on the device, so nothing synchronizes."""
    if reduction == "none":
        return loss_N
    total = loss_N.sum()
    return total / counted(target_N, ignore_index) if reduction == "mean" else total


def counted(target_N: Tensor, ignore_index: int) -> Tensor:
    """Returns the number of rows that are not ignored, at least 1, so that the mean of no rows is 0."""
    return (target_N != ignore_index).sum().clamp_min(1)
