"""Attention of one new token per sequence over a ring buffer, to which the token's key and value are written first.

The ring is updated in place. It consists of the first `ring` positions of the buffers, which may have any strides.

B: sequences, C: positions in the buffer, H: query heads, G: key and value heads, D: head dimension.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_same_dtype, check_sizes
from redline.ops.decode_attention import reference
from redline.ops.dispatch import run


def decode_attention(
    q_BHD: Tensor,
    k_BGD: Tensor,
    v_BGD: Tensor,
    keys_BCGD: Tensor,
    values_BCGD: Tensor,
    lengths_B: Tensor,
    ring: int,
    implementation: str = "auto",
) -> Tensor:
    """Returns (B, H, D). `lengths_B` counts the tokens of each sequence before the new one, and is not changed."""
    op, caches = "decode_attention", {"keys_BCGD": keys_BCGD, "values_BCGD": values_BCGD}
    sizes = check_sizes(op, q_BHD=q_BHD, k_BGD=k_BGD, v_BGD=v_BGD, **caches, lengths_B=lengths_B)
    heads, groups, capacity = sizes["H"], sizes["G"], sizes["C"]
    if groups < 1 or heads % groups:
        raise ModelError(f"{op}: the {heads} query heads must be a multiple of the {groups} key and value heads.")
    if not 0 < ring <= capacity:
        raise ModelError(f"{op}: ring must be from 1 to the {capacity} positions of keys_BCGD, not {ring}.")
    check_floating(op, q_BHD=q_BHD)
    check_same_dtype(op, q_BHD=q_BHD, k_BGD=k_BGD, v_BGD=v_BGD, **caches)
    if lengths_B.is_floating_point():
        raise ModelError(f"{op}: lengths_B must be an integer tensor, not {lengths_B.dtype}.")
    if keys_BCGD.stride() != values_BCGD.stride() or keys_BCGD.stride(-1) != 1:
        raise ModelError(
            f"{op}: keys_BCGD and values_BCGD must have equal strides and a contiguous last dimension, not strides "
            f"{keys_BCGD.stride()} and {values_BCGD.stride()}."
        )
    arguments = (q_BHD, k_BGD, v_BGD, keys_BCGD, values_BCGD, lengths_B, ring)
    return run(op, implementation, (q_BHD,), reference.decode_attention, *arguments)
