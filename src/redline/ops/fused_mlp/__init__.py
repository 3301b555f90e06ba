"""An MLP whose hidden channels go, beside the rows themselves, into one more linear layer; for inference.

`reference.py` is its specification; `triton.py` does it in one pass over the rows where it can, so that the hidden
channels are never written. What stands around the layers is as in `fused_linear`.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.fused_linear import check_around, check_moments, check_new_moments, moments_in_parts
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
    _check(x_MK, inner_HK, inner_bias_H, outer_NJ, outer_bias_N)
    check_around("a fused MLP", x_MK, (inner_HK, outer_NJ), out_MN, activation, residual_MN)
    check_moments(x_MK, moments_P2M, inner_HK, inner_sums_H, channels)
    check_new_moments(out_MN, new_moments_P2M)

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


def _check(x_MK: Tensor, inner_HK: Tensor, inner_bias_H: Tensor, outer_NJ: Tensor, outer_bias_N: Tensor) -> None:
    if x_MK.ndim != 2 or inner_HK.ndim != 2 or outer_NJ.ndim != 2:
        raise ModelError("a fused MLP takes (rows, channels), and weights (columns, channels).")
    channels, hidden, columns = x_MK.shape[1], inner_HK.shape[0], outer_NJ.shape[0]
    if inner_HK.shape[1] != channels or outer_NJ.shape[1] != channels + hidden:
        shapes = f"{tuple(inner_HK.shape)} and {tuple(outer_NJ.shape)}"
        raise ModelError(
            f"a fused MLP of {channels} channels and {hidden} hidden ones takes weights of ({hidden}, {channels}) and "
            f"(columns, {channels + hidden}), not {shapes}."
        )
    for name, tensor, wanted in (("inner", inner_bias_H, hidden), ("outer", outer_bias_N, columns)):
        if tuple(tensor.shape) != (wanted,):
            raise ModelError(f"the {name} bias of {wanted} columns cannot be {tuple(tensor.shape)}.")
