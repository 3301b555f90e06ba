"""Attention of one new token a row to those that a ring of keys and values holds, which it joins.

`reference.py` is the specification, `triton.py` is faster. The ring is written in
place; its first `ring` places are used, at any distance from each other.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.decode_attention import reference
from redline.ops.dispatch import choose


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
    """(B, H, D); `lengths_B` counts the tokens that each row held before, and stays as it is."""
    _check(q_BHD, k_BGD, v_BGD, keys_BCGD, values_BCGD, lengths_B, ring)

    def why_not() -> str:
        from redline.ops.decode_attention import triton

        return triton.why_not(q_BHD)

    arguments = (q_BHD, k_BGD, v_BGD, keys_BCGD, values_BCGD, lengths_B, ring)
    if choose("decode attention", implementation, q_BHD.device, why_not) == "triton":
        from redline.ops.decode_attention import triton

        return triton.decode_attention(*arguments)
    return reference.decode_attention(*arguments)


def _check(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ring: int) -> None:
    shapes = [tuple(t.shape) for t in (q, k, v, keys, values, lengths)]
    if [len(shape) for shape in shapes] != [3, 3, 3, 4, 4, 1]:
        raise ModelError(f"decode attention takes new heads, their ring and lengths, not shapes {shapes}.")
    (rows, heads, dim), (groups, places) = shapes[0], (shapes[1][1], shapes[3][1])
    held = (rows, places, groups, dim)
    fits = shapes[1] == shapes[2] == (rows, groups, dim) and shapes[3] == shapes[4] == held and shapes[5] == (rows,)
    if not fits or heads % groups or not 0 < ring <= places:
        raise ModelError(f"decode attention cannot join shapes {shapes} in a ring of {ring}.")
    if len({t.dtype for t in (q, k, v, keys, values)}) > 1 or lengths.is_floating_point():
        raise ModelError("decode attention takes one floating dtype, and lengths in whole numbers.")
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ModelError("decode attention takes keys and values that lie alike, heads in one piece.")
