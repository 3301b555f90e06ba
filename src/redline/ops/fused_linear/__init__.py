"""A linear layer with LayerNorm before it and activation and residual behind it; for inference.

`reference.py` is its specification, `triton.py` does it in one pass over the rows. Results are written where the caller
says, so that what is to stand side by side needs no joining, and with them their moments, for the layer that normalizes
them next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.errors import ModelError
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
    """Writes residual + share · activation(normalized(x) @ weight.T + bias) into `out`.

    With `moments` rows are normalized; `weight_sums` then holds the sum of each row of the weight in fp32, and
    `channels` how many of K count. `new_moments` takes those of what is written, `moment_parts(N)` parts.
    """
    _check(x_MK, weight_NK, bias_N, out_MN, activation, residual_MN)
    if moments_P2M is not None:
        check_moments(x_MK, moments_P2M, weight_NK, weight_sums_N, channels)
    check_new_moments(out_MN, new_moments_P2M)

    if _choose(implementation, x_MK, weight_NK) == "triton":
        from redline.ops.fused_linear import triton

        triton.fused_linear(
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
    """What `auto` takes for these."""
    return _choose("auto", x_MK, weight_NK)


def _choose(asked: str, x_MK: Tensor, weight_NK: Tensor) -> str:
    def why_not() -> str:
        from redline.ops.fused_linear import triton

        return triton.why_not(x_MK, weight_NK)

    return choose("a fused linear layer", asked, x_MK.device, why_not)


def _check(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor, out_MN: Tensor, activation: str, residual_MN: Tensor | None
) -> None:
    if x_MK.ndim != 2 or weight_NK.ndim != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        shapes = f"{tuple(x_MK.shape)} and {tuple(weight_NK.shape)}"
        raise ModelError(f"a fused linear layer takes (rows, channels) and a weight (columns, channels), not {shapes}.")
    if tuple(bias_N.shape) != (columns := (weight_NK.shape[0],)):
        raise ModelError(f"the bias of {columns[0]} columns cannot be {tuple(bias_N.shape)}.")
    check_around("a fused linear layer", x_MK, (weight_NK,), out_MN, activation, residual_MN)


def check_around(
    op: str,
    x_MK: Tensor,
    weights: Sequence[Tensor],
    out_MN: Tensor,
    activation: str,
    residual_MN: Tensor | None,
) -> None:
    """What is written, and what stands behind the last of the weights."""
    wanted = (x_MK.shape[0], weights[-1].shape[0])
    for name, tensor in (("out", out_MN), ("residual", residual_MN)):
        if tensor is not None and (tuple(tensor.shape) != wanted or tensor.dtype != x_MK.dtype):
            raise ModelError(f"{name} is {wanted} in {x_MK.dtype} here, not {tuple(tensor.shape)} in {tensor.dtype}.")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{op} knows no {activation!r}: it knows gelu and leaky_relu.")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_MK, *weights)):
        raise ModelError(f"{op} is for inference: it has no gradient.")


def check_moments(x_MK: Tensor, moments_P2M: Tensor, weight_NK: Tensor, sums_N: Tensor | None, channels: int) -> None:
    """What rows are normalized by, for this weight."""
    rows, columns = x_MK.shape[0], weight_NK.shape[0]
    if moments_P2M.ndim != 3 or tuple(moments_P2M.shape[1:]) != (2, rows):
        raise ModelError(f"moments of {rows} rows are (parts, 2, {rows}), not {tuple(moments_P2M.shape)}.")
    if sums_N is None or tuple(sums_N.shape) != (columns,):
        raise ModelError(f"normalizing rows takes the sums of all {columns} rows of the weight.")
    if not 0 < channels <= x_MK.shape[1]:
        raise ModelError(f"between 1 and {x_MK.shape[1]} channels can be normalized, not {channels}.")


def check_new_moments(out_MN: Tensor, new_moments_P2M: Tensor | None) -> None:
    rows, columns = out_MN.shape
    wanted = (moment_parts(columns), 2, rows)
    if new_moments_P2M is not None and tuple(new_moments_P2M.shape) != wanted:
        raise ModelError(f"moments of {columns} columns are {wanted} here, not {tuple(new_moments_P2M.shape)}.")
