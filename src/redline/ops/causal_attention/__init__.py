"""Causal attention of each token to a span of tokens that ends with itself.

`reference.py` is the specification in plain PyTorch; `triton.py` has fused kernels with deterministic gradients. All
sequences are concatenated, and `lowest_T` holds the first token that each token sees: packed documents and sliding
windows are both expressed by it. Tokens before the span may be seen through separate queries and keys (`Far`) in the
same softmax.

T: tokens of all sequences, H: query heads, G: key and value heads, D: head dimension.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.causal_attention import reference
from redline.ops.causal_attention.far import Far
from redline.ops.checks import check_floating, check_integers, check_same_device, check_same_dtype, check_shape
from redline.ops.dispatch import choose

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
    """Returns (T, H, D). `lowest_T` must not decrease, and `lowest_T[t]` must not exceed t.

    The values of `lowest_T` are not checked, because that would synchronize with the device.
    """
    _check(q_THD, k_TGD, v_TGD, lowest_T)
    if far is not None:
        _check_far(q_THD, k_TGD, far)
    if _choose(implementation, q_THD, q_THD.shape[-1]) == "triton":
        return _triton().causal_attention(q_THD, k_TGD, v_TGD, lowest_T, far)
    return reference.causal_attention(q_THD, k_TGD, v_TGD, lowest_T, far)


def auto_implementation(like: Tensor, head_dim: int) -> str:
    """Returns the implementation that `auto` takes for queries with this device, dtype and head dimension."""
    return _choose("auto", like, head_dim)


def _choose(requested: str, like: Tensor, head_dim: int) -> str:
    return choose("causal_attention", requested, like.device, lambda: _triton().why_not(like, head_dim))


def _triton():
    from redline.ops.causal_attention import triton  # imports Triton

    return triton


def _check(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor) -> None:
    op, q, k = "causal_attention", tuple(q_THD.shape), tuple(k_TGD.shape)
    if len(q) != 3 or len(k) != 3 or (q[0], q[2]) != (k[0], k[2]):
        raise ModelError(
            f"{op}: q_THD and k_TGD must be (tokens, heads, head_dim) with equal T and D, not {q} and {k}."
        )
    check_shape(op, "v_TGD", v_TGD, k)
    if q[0] < 1:
        raise ModelError(f"{op}: q_THD must have at least one token, not {q}.")
    if k[1] < 1 or q[1] % k[1]:
        raise ModelError(f"{op}: the {q[1]} query heads must be a multiple of the {k[1]} key and value heads.")
    check_floating(op, q_THD=q_THD)
    check_same_dtype(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD)
    check_integers(op, "lowest_T", lowest_T, q[:1])
    check_same_device(op, q_THD=q_THD, k_TGD=k_TGD, v_TGD=v_TGD, lowest_T=lowest_T)


def _check_far(q_THD: Tensor, k_TGD: Tensor, far: Far) -> None:
    op = "causal_attention"
    check_shape(op, "far.q_THD", far.q_THD, q_THD.shape)
    check_shape(op, "far.k_TGD", far.k_TGD, k_TGD.shape)
    check_shape(op, "far.bias_T", far.bias_T, q_THD.shape[:1])
    check_floating(op, far_bias_T=far.bias_T)
    check_same_dtype(op, q_THD=q_THD, far_q_THD=far.q_THD, far_k_TGD=far.k_TGD)
    check_integers(op, "far.first_T", far.first_T, q_THD.shape[:1])
    check_same_device(
        op, q_THD=q_THD, far_q_THD=far.q_THD, far_k_TGD=far.k_TGD, far_bias_T=far.bias_T, far_first_T=far.first_T
    )
