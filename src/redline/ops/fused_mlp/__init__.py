"""An MLP for inference whose second linear layer reads the input concatenated with the hidden activations.

If the rows and the result are narrow enough, `triton.py` computes the MLP in one kernel that never writes the hidden
activations to memory. Normalization, activation and residual are those of `fused_linear`.

M: rows, K: input channels, H: hidden channels, J: K + H, N: output columns, P: blocks of columns with own moments.
"""

from torch import Tensor

from redline.ops.checks import check_shape, check_sizes
from redline.ops.dispatch import kernels, select
from redline.ops.fused_linear import check_fused, moments_in_parts
from redline.ops.fused_mlp import reference


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

    The result is written into `out_MN`; [a | b] is the concatenation of columns. `inner_sums_H` is the fp32 sum of each
    row of the inner weight. The other arguments are those of `fused_linear`.
    """
    op, around = "fused_mlp", {"out_MN": out_MN, "residual_MN": residual_MN, "moments_P2M": moments_P2M}
    sums = {"inner_bias_H": inner_bias_H, "inner_sums_H": inner_sums_H, "outer_bias_N": outer_bias_N}
    sizes = check_sizes(op, x_MK=x_MK, inner_HK=inner_HK, outer_NJ=outer_NJ, **sums, **around)
    check_shape(op, "outer_NJ", outer_NJ, (sizes["N"], sizes["K"] + sizes["H"]))
    check_fused(op, x_MK, (inner_HK, outer_NJ), out_MN, residual_MN, new_moments_P2M, activation, channels)
    if select(op, implementation, x_MK, inner_HK, outer_NJ) == "triton":
        kernels(op).fused_mlp(
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
