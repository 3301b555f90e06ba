"""An MLP whose input and hidden activations are concatenated and go into a second linear layer, for inference.

`reference.py` is the specification in plain PyTorch. `triton.py` computes it in one kernel where it can, which never
writes the hidden activations to memory. Normalization, activation and residual are those of `fused_linear`.

M: rows, K: input channels, H: hidden channels, J: K + H, N: output columns, P: parts of the moments.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_shape
from redline.ops.dispatch import choose
from redline.ops.fused_linear import check_epilogue, check_moments, check_new_moments, moments_in_parts
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
    """Writes residual + share · activation([x | gelu(normalized(x) @ inner.T + inner_bias)] @ outer.T + outer_bias).

    J is K + H. `inner_sums_H` is the fp32 sum of each row of the inner weight. The other arguments are those of
    `fused_linear`.
    """
    _check(x_MK, inner_HK, inner_bias_H, outer_NJ, outer_bias_N)
    check_epilogue("fused_mlp", x_MK, (inner_HK, outer_NJ), out_MN, activation, residual_MN)
    check_moments("fused_mlp", x_MK, moments_P2M, inner_HK, inner_sums_H, channels)
    check_new_moments("fused_mlp", out_MN, new_moments_P2M)
    if (
        choose("fused_mlp", implementation, x_MK.device, lambda: _triton().why_not(x_MK, inner_HK, outer_NJ))
        == "triton"
    ):
        _triton().fused_mlp(
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


def _triton():
    from redline.ops.fused_mlp import triton  # imports Triton

    return triton


def _check(x_MK: Tensor, inner_HK: Tensor, inner_bias_H: Tensor, outer_NJ: Tensor, outer_bias_N: Tensor) -> None:
    op = "fused_mlp"
    if x_MK.ndim != 2 or inner_HK.ndim != 2 or outer_NJ.ndim != 2:
        shapes = f"{tuple(x_MK.shape)}, {tuple(inner_HK.shape)} and {tuple(outer_NJ.shape)}"
        raise ModelError(f"{op}: x_MK, inner_HK and outer_NJ must have two dimensions, not {shapes}.")
    channels, hidden, columns = x_MK.shape[1], inner_HK.shape[0], outer_NJ.shape[0]
    check_shape(op, "inner_HK", inner_HK, (hidden, channels))
    check_shape(op, "outer_NJ", outer_NJ, (columns, channels + hidden))
    check_shape(op, "inner_bias_H", inner_bias_H, (hidden,))
    check_shape(op, "outer_bias_N", outer_bias_N, (columns,))
