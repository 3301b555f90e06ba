"""Rotary position embedding of queries and keys; `reference.py` is its specification, `triton.py` is faster."""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.dispatch import choose
from redline.ops.rope import reference
from redline.ops.rope.tables import LinearScaling, Llama3Scaling, Scaling, frequencies, rope_tables

__all__ = ["LinearScaling", "Llama3Scaling", "Scaling", "frequencies", "rope", "rope_tables"]


def rope(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    cos_SD: Tensor,
    sin_SD: Tensor,
    positions_BS: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned by their positions; the tables (see `rope_tables`) have a row for each position.

    Without positions, token s is at position s. What lies in slices of a larger tensor is read where it lies.
    """
    _check(q_BSHD, k_BSHD, cos_SD, sin_SD, positions_BS)

    def why_not() -> str:
        from redline.ops.rope import triton

        return triton.why_not(q_BSHD)

    if choose("rope", implementation, q_BSHD.device, why_not) == "triton":
        from redline.ops.rope import triton

        return triton.rope(q_BSHD, k_BSHD, cos_SD, sin_SD, positions_BS)
    return reference.rope(q_BSHD, k_BSHD, cos_SD, sin_SD, positions_BS)


def _check(q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, positions_BS: Tensor | None) -> None:
    q, k = tuple(q_BSHD.shape), tuple(k_BSHD.shape)
    if len(q) != 4 or len(k) != 4 or q[:2] != k[:2] or q[3] != k[3] or q[3] % 2:
        raise ModelError(f"rope takes (batch, tokens, heads, even channels) of both, with any heads, not {q} and {k}.")
    if q_BSHD.dtype != k_BSHD.dtype or not q_BSHD.is_floating_point():
        raise ModelError(f"rope takes queries and keys of one floating dtype, not {q_BSHD.dtype} and {k_BSHD.dtype}.")
    tables = tuple(cos_SD.shape)
    if len(tables) != 2 or cos_SD.shape != sin_SD.shape or tables[1] != q[3] // 2:
        both = f"{tables} and {tuple(sin_SD.shape)}"
        raise ModelError(f"rope's tables have {q[3] // 2} columns for heads of {q[3]} channels, not {both}.")
    if cos_SD.requires_grad or sin_SD.requires_grad:
        raise ModelError("rope's tables are constants: they get no gradient.")
    tensors = [k_BSHD, cos_SD, sin_SD]
    if positions_BS is None:
        if q[1] > tables[0]:
            raise ModelError(f"rope's tables end at {tables[0]} tokens, and the text has {q[1]}.")
    else:
        tensors.append(positions_BS)
        if tuple(positions_BS.shape) != q[:2] or positions_BS.dtype not in (torch.int32, torch.int64):
            given = f"{tuple(positions_BS.shape)} in {positions_BS.dtype}"
            raise ModelError(f"rope takes a whole number for each of {q[0]} × {q[1]} tokens, not {given}.")
    for tensor in tensors:
        if tensor.device != q_BSHD.device:
            raise ModelError(f"rope's inputs are on {q_BSHD.device} and on {tensor.device}.")
