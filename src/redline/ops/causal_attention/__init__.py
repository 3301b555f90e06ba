"""Causal attention of each token over a span of tokens that ends with itself, with deterministic gradients.

All sequences are concatenated, and `lowest_T` holds the index of the first token that each token sees, which
expresses both packed documents and sliding windows. In the same softmax, `Far` can score tokens before the span with
separate queries and keys.

T: tokens of all sequences, H: query heads, G: key and value heads, D: head dimension.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.causal_attention import reference
from redline.ops.causal_attention.reference import Far
from redline.ops.checks import check_floating, check_integer, check_same_device, check_same_dtype, check_sizes
from redline.ops.dispatch import run, select

__all__ = ["Far", "auto_implementation", "causal_attention"]


def causal_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    lowest_T: Tensor,
    implementation: str = "auto",
    *,
    far: Far | None = None,
) -> Tensor:
    """Returns (T, H, D). `lowest_T` must not decrease from one token to the next, and `lowest_T[t]` must not exceed t.

    The values of `lowest_T` are not checked, because that would synchronize with the device.
    """
    op = "causal_attention"
    sizes = check_sizes(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, lowest_T=lowest_T)
    if sizes["T"] < 1:
        raise ModelError(f"{op}: q_THD must have at least one token, not {tuple(q_THD.shape)}.")
    if sizes["G"] < 1 or sizes["H"] % sizes["G"]:
        raise ModelError(
            f"{op}: the {sizes['H']} query heads must be a multiple of the {sizes['G']} key and value heads."
        )
    check_floating(op, q_THD=q_THD)
    check_same_dtype(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD)
    check_integer(op, "lowest_T", lowest_T)
    check_same_device(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, lowest_T=lowest_T)
    if far is not None:
        _check_far(op, q_THD, k_TGD, far)
    supported, tensors = (q_THD, q_THD.shape[-1]), (q_THD, k_TGD, v_TGD, lowest_T)
    return run(op, implementation, supported, reference.causal_attention, *tensors, far)


def auto_implementation(like: Tensor, head_dim: int) -> str:
    """Returns the implementation that `auto` selects for queries with this device, dtype and head dimension."""
    return select("causal_attention", "auto", like, head_dim)


def _check_far(op: str, q_THD: Tensor, k_TGD: Tensor, far: Far) -> None:
    tensors = {f"far.{name}": tensor for name, tensor in far._asdict().items()}
    check_sizes(op, q_THD=q_THD, k_TGD=k_TGD, **tensors)
    check_floating(op, **{"far.bias_T": far.bias_T})
    check_same_dtype(op, q_THD=q_THD, **{"far.q_THD": far.q_THD, "far.k_TGD": far.k_TGD})
    check_integer(op, "far.first_T", far.first_T)
    check_same_device(op, q_THD=q_THD, **tensors)
