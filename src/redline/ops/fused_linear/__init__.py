"""A linear layer fused with the LayerNorm before it and the activation and residual after it, for inference.

The result is written into a tensor of the caller, which may be a slice of a wider one, so that results need no
concatenation. If the next layer normalizes the result, the op also writes the moments that the next layer needs: the
sum and the sum of squares of each row.

M: rows, K: input channels, N: output columns, P: blocks of 128 columns, each of which has its own moments.
"""

from collections.abc import Sequence

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_no_gradient, check_same_dtype, check_shape, check_sizes
from redline.ops.dispatch import kernels, select
from redline.ops.fused_linear import reference
from redline.ops.fused_linear.reference import ACTIVATIONS, moment_parts, moments, moments_in_parts

__all__ = ["auto_implementation", "fused_linear", "moments", "moments_in_parts", "moment_parts"]


def fused_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor,
    out_MN: Tensor,
    moments_P2M: Tensor | None = None,
    weight_sums_N: Tensor | None = None,
    channels: int = 0,
    eps: float = 1e-5,
    activation: str = "",
    residual_MN: Tensor | None = None,
    share: float = 1.0,
    new_moments_P2M: Tensor | None = None,
    implementation: str = "auto",
) -> None:
    """Writes residual + share · activation(normalized(x) @ weight.T + bias) into `out_MN`.

    The rows of x are normalized if their moments `moments_P2M` are given. `weight_sums_N` is then the fp32 sum of each
    row of the weight, and `channels` the number of channels that are not padding. `new_moments_P2M` receives the
    moments of the result. `share` has no effect without a residual.
    """
    op, around = "fused_linear", {"out_MN": out_MN, "residual_MN": residual_MN, "moments_P2M": moments_P2M}
    check_sizes(op, x_MK=x_MK, weight_NK=weight_NK, bias_N=bias_N, weight_sums_N=weight_sums_N, **around)
    if moments_P2M is not None and weight_sums_N is None:
        raise ModelError(f"{op}: normalizing needs weight_sums_N, the sums of the weight's rows.")
    normalized = None if moments_P2M is None else channels
    check_fused(op, x_MK, (weight_NK,), out_MN, residual_MN, new_moments_P2M, activation, normalized)
    if select(op, implementation, x_MK, weight_NK) == "triton":
        kernels(op).fused_linear(
            x_MK, weight_NK, bias_N, out_MN, moments_P2M, weight_sums_N, channels, eps, activation, residual_MN, share,
            new_moments_P2M,
        )  # fmt: skip
        return
    out_MN.copy_(
        reference.fused_linear(x_MK, weight_NK, bias_N, moments_P2M, channels, eps, activation, residual_MN, share)
    )
    if new_moments_P2M is not None:
        new_moments_P2M.copy_(moments_in_parts(out_MN))


def auto_implementation(x_MK: Tensor, weight_NK: Tensor) -> str:
    """Returns the implementation that `auto` selects for these tensors."""
    return select("fused_linear", "auto", x_MK, weight_NK)


def check_fused(
    op: str,
    x_MK: Tensor,
    weights: Sequence[Tensor],
    out_MN: Tensor,
    residual_MN: Tensor | None,
    new_moments_P2M: Tensor | None,
    activation: str,
    channels: int | None,
) -> None:
    """Checks the arguments of `fused_linear` and `fused_mlp`. `channels` is None if nothing is normalized."""
    check_same_dtype(op, x_MK=x_MK, out_MN=out_MN, residual_MN=residual_MN)
    if activation not in ACTIVATIONS:
        raise ModelError(f"{op}: unknown activation {activation!r} (supported: gelu, leaky_relu, or empty).")
    if channels is not None and not 0 < channels <= x_MK.shape[1]:
        raise ModelError(f"{op}: channels must be from 1 to {x_MK.shape[1]}, not {channels}.")
    if new_moments_P2M is not None:
        rows, columns = out_MN.shape
        check_shape(op, "new_moments_P2M", new_moments_P2M, (moment_parts(columns), 2, rows))
    check_no_gradient(op, x_MK=x_MK, **{f"weight_{index}": weight for index, weight in enumerate(weights)})
