"""Attention of each token to a stretch of tokens that ends with itself: rows, documents and windows are one to it.

`reference.py` is the specification, `triton.py` is faster, and its gradients repeat to the bit. All rows lie end to
end; `lowest` says for each token which is the first that it sees.

T: tokens of all rows, H: heads, G: key and value heads, D: width of a head.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.causal_attention import reference
from redline.ops.dispatch import choose

__all__ = ["causal_attention", "fastest"]


def causal_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lowest_T: Tensor, implementation: str = "auto"
) -> Tensor:
    """(T, H, D). `lowest_T` never falls from one token to the next, and none is beyond its own token.

    It is not checked: the host would have to wait for the device.
    """
    _check(q_THD, k_TGD, v_TGD, lowest_T)
    if _choose(implementation, q_THD, q_THD.shape[-1]) == "triton":
        from redline.ops.causal_attention import triton

        return triton.causal_attention(q_THD, k_TGD, v_TGD, lowest_T)
    return reference.causal_attention(q_THD, k_TGD, v_TGD, lowest_T)


def fastest(like: Tensor, head_dim: int) -> str:
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
    if tuple(lowest_T.shape) != q[:1] or lowest_T.dtype not in (torch.int32, torch.int64):
        given = f"{tuple(lowest_T.shape)} in {lowest_T.dtype}"
        raise ModelError(f"causal attention takes a whole number for each of {q[0]} tokens, not {given}.")
    for tensor in (k_TGD, v_TGD, lowest_T):
        if tensor.device != q_THD.device:
            raise ModelError(f"causal attention's inputs are on {q_THD.device} and on {tensor.device}.")
