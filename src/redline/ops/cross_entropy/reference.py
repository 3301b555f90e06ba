"""Cross-entropy between logits and the classes that were right, in plain PyTorch: the specification.

Shapes: N rows of V classes. With lse the logarithm of a row's sum of exponentials, smoothing s and target t, a row's
loss is lse − (1 − s) · logit_t − s · mean of its logits + z_loss · lse². All of it is fp32, and so is the result (fp64
for fp64), whatever the dtype of the logits: a loss in bf16 has three digits.
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
    """The loss of each row, or their sum, or their mean over the rows that are not ignored."""
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    classes = exact.shape[1]
    known = (target_N >= 0) & (target_N < classes)
    # What is ignored has no say, whatever it is: not even a NaN reaches a gradient.
    exact = torch.where((target_N == ignore_index)[:, None], 0.0, exact)
    lse = exact.logsumexp(1)
    picked = exact.gather(1, torch.where(known, target_N, 0).long()[:, None])[:, 0]
    loss_N = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        loss_N = loss_N - label_smoothing * exact.mean(1)
    if z_loss:
        loss_N = loss_N + z_loss * lse.square()
    # A factor, and not a value put in its place: gradients must be NaN too.
    ignored = target_N == ignore_index
    loss_N = loss_N * torch.where(known | ignored, 1.0, torch.nan).to(loss_N.dtype)
    return reduced(torch.where(ignored, 0.0, loss_N), target_N, ignore_index, reduction)


def reduced(loss_N: Tensor, target_N: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """What is made of the rows' losses; the number of rows that count stays on the device."""
    if reduction == "none":
        return loss_N
    total = loss_N.sum()
    return total / counted(target_N, ignore_index) if reduction == "mean" else total


def counted(target_N: Tensor, ignore_index: int) -> Tensor:
    """How many rows are not ignored, but at least 1: the mean of no rows is 0, and their gradients are 0."""
    return (target_N != ignore_index).sum().clamp_min(1)
