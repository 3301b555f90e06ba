"""A linear layer fused with cross-entropy, which does not store the logits of all rows on a GPU.

`reference.py` is the specification in plain PyTorch; `triton.py` computes the logits in chunks of rows.

N: rows, D: features, V: classes.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_same_device, check_same_dtype, check_shape
from redline.ops.cross_entropy import check_options, check_targets
from redline.ops.dispatch import choose
from redline.ops.linear_cross_entropy import reference

__all__ = ["linear_cross_entropy"]


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
    the logits of only one chunk of rows. With reduction `none` the backward pass recomputes the logits, which is one
    more matrix multiplication. The reference stores all logits.
    """
    op = "linear_cross_entropy"
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        shapes = f"{tuple(hidden_ND.shape)} and {tuple(weight_VD.shape)}"
        raise ModelError(f"{op}: hidden_ND must be (rows, features) and weight_VD (classes, features), not {shapes}.")
    if bias_V is not None:
        check_shape(op, "bias_V", bias_V, weight_VD.shape[:1])
    check_same_device(op, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)
    check_options(op, label_smoothing, z_loss, reduction)
    check_targets(op, hidden_ND, target_N, weight_VD.shape[0], ignore_index)
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden_ND, weight_VD = hidden_ND.to(lower), weight_VD.to(lower)
        bias_V = None if bias_V is None else bias_V.to(lower)
    check_same_dtype(op, hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V)

    def why_not() -> str:
        from redline.ops import kernel

        return kernel.why_not(hidden_ND)

    arguments = (hidden_ND, weight_VD, target_N, bias_V, ignore_index, label_smoothing, z_loss, reduction)
    if choose(op, implementation, hidden_ND.device, why_not) == "reference":
        return reference.linear_cross_entropy(*arguments)
    from redline.ops.linear_cross_entropy import triton

    return triton.linear_cross_entropy(*arguments)
