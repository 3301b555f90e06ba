"""A linear layer fused with the LayerNorm before it and the activation and residual after it, for inference.

`reference.py` is the specification in plain PyTorch; `triton.py` has the fused kernels. The result is written into a
tensor of the caller, which may be a slice of a wider one, so that results need no concatenation. The moments of the
result are written too, for a layer that normalizes it next.

M: rows, K: input channels, N: output columns, P: parts of the moments.
"""

from collections.abc import Sequence

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_no_gradient, check_shape
from redline.ops.dispatch import choose
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

    Rows are normalized if `moments_P2M` is given; `weight_sums_N` is then the fp32 sum of each row of the weight, and
    `channels` the number of channels that are not padding. `new_moments_P2M`, with `moment_parts(N)` parts, receives
    the moments of the result.
    """
    _check(x_MK, weight_NK, bias_N, out_MN, activation, residual_MN)
    if moments_P2M is not None:
        check_moments("fused_linear", x_MK, moments_P2M, weight_NK, weight_sums_N, channels)
    check_new_moments("fused_linear", out_MN, new_moments_P2M)
    if _choose(implementation, x_MK, weight_NK) == "triton":
        _triton().fused_linear(
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
    """Returns the implementation that `auto` takes for these tensors."""
    return _choose("auto", x_MK, weight_NK)


def _choose(requested: str, x_MK: Tensor, weight_NK: Tensor) -> str:
    return choose("fused_linear", requested, x_MK.device, lambda: _triton().why_not(x_MK, weight_NK))


def _triton():
    from redline.ops.fused_linear import triton  # imports Triton

    return triton


def _check(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor, out_MN: Tensor, activation: str, residual_MN: Tensor | None
) -> None:
    op = "fused_linear"
    if x_MK.ndim != 2 or weight_NK.ndim != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        shapes = f"{tuple(x_MK.shape)} and {tuple(weight_NK.shape)}"
        raise ModelError(f"{op}: x_MK must be (rows, channels) and weight_NK (columns, channels), not {shapes}.")
    check_shape(op, "bias_N", bias_N, weight_NK.shape[:1])
    check_epilogue(op, x_MK, (weight_NK,), out_MN, activation, residual_MN)


def check_epilogue(
    op: str,
    x_MK: Tensor,
    weights: Sequence[Tensor],
    out_MN: Tensor,
    activation: str,
    residual_MN: Tensor | None,
) -> None:
    """Checks the dtypes and shapes of output and residual, the activation, and that no gradient is needed."""
    expected = (x_MK.shape[0], weights[-1].shape[0])
    for name, tensor in (("out_MN", out_MN), ("residual_MN", residual_MN)):
        if tensor is not None and (tuple(tensor.shape) != expected or tensor.dtype != x_MK.dtype):
            given = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ModelError(f"{op}: {name} must be {expected} {x_MK.dtype}, not {given}.")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{op}: unknown activation {activation!r} (supported: gelu, leaky_relu, or empty).")
    check_no_gradient(op, x_MK=x_MK, **{f"weight_{index}": weight for index, weight in enumerate(weights)})


def check_moments(
    op: str, x_MK: Tensor, moments_P2M: Tensor, weight_NK: Tensor, sums_N: Tensor | None, channels: int
) -> None:
    """Checks the arguments for normalizing the rows that are multiplied by this weight."""
    rows, columns = x_MK.shape[0], weight_NK.shape[0]
    if moments_P2M.ndim != 3 or tuple(moments_P2M.shape[1:]) != (2, rows):
        raise ModelError(f"{op}: moments_P2M must be (parts, 2, {rows}), not {tuple(moments_P2M.shape)}.")
    if sums_N is None or tuple(sums_N.shape) != (columns,):
        given = "None" if sums_N is None else str(tuple(sums_N.shape))
        raise ModelError(f"{op}: normalizing needs the sums of the weight's rows, of shape {(columns,)}, not {given}.")
    if not 0 < channels <= x_MK.shape[1]:
        raise ModelError(f"{op}: channels must be from 1 to {x_MK.shape[1]}, not {channels}.")


def check_new_moments(op: str, out_MN: Tensor, new_moments_P2M: Tensor | None) -> None:
    rows, columns = out_MN.shape
    if new_moments_P2M is not None:
        check_shape(op, "new_moments_P2M", new_moments_P2M, (moment_parts(columns), 2, rows))
