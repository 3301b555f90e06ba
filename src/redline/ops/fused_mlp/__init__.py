"""An MLP whose hidden channels go, beside the rows themselves, into one more linear layer; for inference.

`reference.py` is its specification; `triton.py` does it in one pass over the rows where it can, so that the hidden
channels are never written. What stands around the layers is as in `fused_linear`.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.fused_linear import moments_in_parts, parts_of
from redline.ops.fused_linear.reference import ACTIVATIONS
from redline.ops.fused_mlp import reference

__all__ = ["fused_mlp"]


def fused_mlp(
    x_MK: Tensor,
    inner_HK: Tensor,
    inner_bias_H: Tensor,
    outer_NJ: Tensor,
    outer_bias_N: Tensor,
    out_MN: Tensor,
    moments_P2M: Tensor,
    inner_sums_H: Tensor,
    channels: int,
    eps: float = 1e-5,
    activation: str = "",
    residual_MN: Tensor | None = None,
    share: float = 1.0,
    new_moments_P2M: Tensor | None = None,
    implementation: str = "auto",
) -> None:
    """Writes residual + share · activation([x | gelu(normalized(x) @ inner.T + its bias)] @ outer.T + its bias).

    J is K + H. `inner_sums` holds the sum of each row of the inner weight in fp32; moments and channels are as in
    `fused_linear`.
    """
    _check(x_MK, inner_HK, inner_bias_H, outer_NJ, outer_bias_N, out_MN, residual_MN)
    _check_moments(x_MK, out_MN, moments_P2M, inner_sums_H, inner_HK.shape[0], channels, new_moments_P2M)
    if activation not in ACTIVATIONS:
        raise ModelError(f"a fused MLP knows no {activation!r}: it knows gelu and leaky_relu.")

    def why_not() -> str:
        from redline.ops.fused_mlp import triton

        return triton.why_not(x_MK, inner_HK, outer_NJ)

    if choose("a fused MLP", implementation, x_MK.device, why_not) == "triton":
        from redline.ops.fused_mlp import triton

        triton.fused_mlp(
            x_MK, inner_HK, inner_bias_H, outer_NJ, outer_bias_N, out_MN, moments_P2M, inner_sums_H, channels, eps,
            activation, residual_MN, share, new_moments_P2M,
        )  # fmt: skip
        return
    out_MN.copy_(
        reference.fused_mlp(
            x_MK, inner_HK, inner_bias_H, outer_NJ, outer_bias_N, moments_P2M, channels, eps, activation, residual_MN,
            share,
        )
    )  # fmt: skip
    if new_moments_P2M is not None:
        new_moments_P2M.copy_(moments_in_parts(out_MN))


def _check(
    x_MK: Tensor,
    inner_HK: Tensor,
    inner_bias_H: Tensor,
    outer_NJ: Tensor,
    outer_bias_N: Tensor,
    out_MN: Tensor,
    residual_MN: Tensor | None,
) -> None:
    if x_MK.ndim != 2 or inner_HK.ndim != 2 or outer_NJ.ndim != 2:
        raise ModelError("a fused MLP takes (rows, channels), and weights (columns, channels).")
    (rows, channels), hidden, columns = x_MK.shape, inner_HK.shape[0], outer_NJ.shape[0]
    if inner_HK.shape[1] != channels or outer_NJ.shape[1] != channels + hidden:
        shapes = f"{tuple(inner_HK.shape)} and {tuple(outer_NJ.shape)}"
        raise ModelError(
            f"a fused MLP of {channels} channels and {hidden} hidden ones takes weights of ({hidden}, {channels}) and "
            f"(columns, {channels + hidden}), not {shapes}."
        )
    for name, tensor, wanted in (("inner", inner_bias_H, hidden), ("outer", outer_bias_N, columns)):
        if tuple(tensor.shape) != (wanted,):
            raise ModelError(f"the {name} bias of {wanted} columns cannot be {tuple(tensor.shape)}.")
    for name, tensor in (("out", out_MN), ("residual", residual_MN)):
        if tensor is not None and (tuple(tensor.shape) != (rows, columns) or tensor.dtype != x_MK.dtype):
            found = f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise ModelError(f"{name} is {(rows, columns)} in {x_MK.dtype} here, not {found}.")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_MK, inner_HK, outer_NJ)):
        raise ModelError("a fused MLP is for inference: it has no gradient.")


def _check_moments(
    x_MK: Tensor,
    out_MN: Tensor,
    moments_P2M: Tensor,
    inner_sums_H: Tensor,
    hidden: int,
    channels: int,
    new_moments_P2M: Tensor | None,
) -> None:
    rows, columns = out_MN.shape
    if moments_P2M.ndim != 3 or tuple(moments_P2M.shape[1:]) != (2, rows):
        raise ModelError(f"moments of {rows} rows are (parts, 2, {rows}), not {tuple(moments_P2M.shape)}.")
    if tuple(inner_sums_H.shape) != (hidden,):
        raise ModelError(f"normalizing rows takes the sums of all {hidden} rows of the inner weight.")
    if not 0 < channels <= x_MK.shape[1]:
        raise ModelError(f"between 1 and {x_MK.shape[1]} channels can be normalized, not {channels}.")
    wanted = (parts_of(columns), 2, rows)
    if new_moments_P2M is not None and tuple(new_moments_P2M.shape) != wanted:
        raise ModelError(f"moments of {columns} columns are {wanted} here, not {tuple(new_moments_P2M.shape)}.")
