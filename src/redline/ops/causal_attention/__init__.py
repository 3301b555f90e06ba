"""Attention of each token to a stretch of tokens that ends with itself: rows, documents and windows are one to it.

`reference.py` is the specification, `triton.py` is faster, and its gradients repeat to the bit. All rows lie end to
end; `lowest` says for each token which is the first that it sees. What comes before may be seen in another way, `Far`,
in the same softmax.

T: tokens of all rows, H: heads, G: key and value heads, D: width of a head.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.causal_attention import reference
from redline.ops.causal_attention.far import Far
from redline.ops.dispatch import choose

__all__ = ["Far", "causal_attention", "auto_implementation"]


def causal_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    lowest_T: Tensor,
    implementation: str = "auto",
    *,
    far: Far | None = None,
) -> Tensor:
    """(T, H, D). `lowest_T` never falls from one token to the next, and none is beyond its own token.

    It is not checked: the host would have to wait for the device.
    """
    _check(q_THD, k_TGD, v_TGD, lowest_T)
    if far is not None:
        _check_far(q_THD, k_TGD, far)
    if _choose(implementation, q_THD, q_THD.shape[-1]) == "triton":
        from redline.ops.causal_attention import triton

        return triton.causal_attention(q_THD, k_TGD, v_TGD, lowest_T, far)
    return reference.causal_attention(q_THD, k_TGD, v_TGD, lowest_T, far)


def auto_implementation(like: Tensor, head_dim: int) -> str:
    """What `auto` takes for queries of this device and dtype, in heads of so many channels."""
    return _choose("auto", like, head_dim)


def _choose(asked: str, like: Tensor, head_dim: int) -> str:
    def why_not() -> str:
        from redline.ops.causal_attention import triton

        return triton.why_not(like, head_dim)

    return choose("causal attention", asked, like.device, why_not)


def _check(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor) -> None:
    q, k, v = (tuple(t.shape) for t in (q_THD, k_TGD, v_TGD))
    if len(q) != 3 or len(k) != 3 or k != v or (q[0], q[2]) != (k[0], k[2]):
        raise ModelError(f"causal attention takes (tokens, heads, channels) of all three, not {q}, {k} and {v}.")
    if q[0] < 1 or k[1] < 1 or q[1] % k[1]:
        raise ModelError(f"{q[1]} heads cannot share {k[1]} keys and values evenly over {q[0]} tokens.")
    if len({t.dtype for t in (q_THD, k_TGD, v_TGD)}) > 1 or not q_THD.is_floating_point():
        given = ", ".join(str(t.dtype) for t in (q_THD, k_TGD, v_TGD))
        raise ModelError(f"causal attention takes one floating dtype, not {given}.")
    _check_numbers(lowest_T, q[0])
    _check_together(q_THD, k_TGD, v_TGD, lowest_T)


def _check_far(q_THD: Tensor, k_TGD: Tensor, far: Far) -> None:
    for near, other in ((q_THD, far.q_THD), (k_TGD, far.k_TGD)):
        if (near.shape, near.dtype) != (other.shape, other.dtype):
            given = f"{tuple(other.shape)} in {other.dtype} for {tuple(near.shape)} in {near.dtype}"
            raise ModelError(f"what is far is seen by queries and keys like those that are near, not by {given}.")
    if far.bias_T.shape != q_THD.shape[:1] or not far.bias_T.is_floating_point():
        given = f"{tuple(far.bias_T.shape)} in {far.bias_T.dtype}"
        raise ModelError(f"causal attention takes a bias for each of {len(q_THD)} tokens, not {given}.")
    _check_numbers(far.first_T, len(q_THD))
    _check_together(q_THD, *far)


def _check_numbers(places_T: Tensor, tokens: int) -> None:
    if tuple(places_T.shape) != (tokens,) or places_T.dtype not in (torch.int32, torch.int64):
        given = f"{tuple(places_T.shape)} in {places_T.dtype}"
        raise ModelError(f"causal attention takes a whole number for each of {tokens} tokens, not {given}.")


def _check_together(one: Tensor, *others: Tensor) -> None:
    for tensor in others:
        if tensor.device != one.device:
            raise ModelError(f"causal attention's inputs are on {one.device} and on {tensor.device}.")
