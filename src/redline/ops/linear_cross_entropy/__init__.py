"""A linear layer and cross-entropy behind it; on a GPU the logits go through a buffer, and none are kept."""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops import dispatch
from redline.ops.cross_entropy import check_options, check_targets
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
    """The cross-entropy of hidden · weightᵀ + bias: the same words, and the same care, as `cross_entropy`.

    By Triton, gradients are made during the forward pass of whatever requires them, so that the logits of a chunk of
    rows are enough; with the reduction `none` backward makes the logits anew, one product more. A CPU takes the
    reference, and stores the logits.
    """
    _check(hidden_ND, weight_VD, bias_V)
    check_options(label_smoothing, z_loss, reduction)
    check_targets(hidden_ND, target_N, weight_VD.shape[0], ignore_index)
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden_ND, weight_VD = hidden_ND.to(lower), weight_VD.to(lower)
        bias_V = None if bias_V is None else bias_V.to(lower)
    for name, tensor in (("weight", weight_VD), ("bias", bias_V)):
        if tensor is not None and tensor.dtype != hidden_ND.dtype:
            raise ModelError(f"the {name} is {tensor.dtype}, but the hidden rows are {hidden_ND.dtype}.")

    def why_not() -> str:
        from redline.ops import kernel

        return kernel.why_not(hidden_ND)

    arguments = (hidden_ND, weight_VD, target_N, bias_V, ignore_index, label_smoothing, z_loss, reduction)
    if dispatch.choose("linear cross-entropy", implementation, hidden_ND.device, why_not) == "reference":
        return reference.linear_cross_entropy(*arguments)
    from redline.ops.linear_cross_entropy import triton

    return triton.linear_cross_entropy(*arguments)


def _check(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        shapes = f"{tuple(hidden_ND.shape)} and {tuple(weight_VD.shape)}"
        raise ModelError(f"linear cross-entropy takes (rows, features) and weights (classes, features), not {shapes}.")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ModelError(f"{len(weight_VD)} classes need as many biases, not {tuple(bias_V.shape)}.")
    for name, tensor in (("weight", weight_VD), ("bias", bias_V)):
        if tensor is not None and tensor.device != hidden_ND.device:
            raise ModelError(f"the {name} is on {tensor.device}, but the hidden rows are on {hidden_ND.device}.")
