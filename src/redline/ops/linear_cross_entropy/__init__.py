"""A linear layer fused with cross-entropy, which does not store the logits of all rows on a GPU.

N: rows, D: features, V: classes.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_same_device, check_same_dtype, check_sizes
from redline.ops.cross_entropy import check_options, check_targets
from redline.ops.dispatch import run
from redline.ops.linear_cross_entropy import reference


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    implementation: str = "auto",
) -> Tensor:
    """Returns the cross-entropy of hidden · weightᵀ + bias, with the options and guarantees of `cross_entropy`.

    The Triton implementation computes the gradients of all inputs that require them in the forward pass, so it holds
    the logits of only one chunk of rows. With reduction `none` the backward pass recomputes the logits, which takes
    one more matrix multiplication. The reference stores all logits.
    """
    op = "linear_cross_entropy"
    if not check_sizes(op, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)["V"]:
        raise ModelError(f"{op}: weight_VD must have at least one class, not {tuple(weight_VD.shape)}.")
    check_same_device(op, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)
    check_options(op, label_smoothing, z_loss, reduction)
    check_targets(op, hidden_ND, target_N, weight_VD.shape[0], ignore_index)
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden_ND, weight_VD = hidden_ND.to(lower), weight_VD.to(lower)
        bias_V = None if bias_V is None else bias_V.to(lower)
    check_same_dtype(op, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)
    arguments = (hidden_ND, weight_VD, target_N, bias_V, ignore_index, label_smoothing, z_loss, reduction)
    return run(op, implementation, (hidden_ND,), reference.linear_cross_entropy, *arguments)
