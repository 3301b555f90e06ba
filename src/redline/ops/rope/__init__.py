"""Rotary position embedding of queries and keys.

B: sequences, S: tokens or positions, H: heads, D: head dimension (half of it in the tables).
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_integers, check_same_device, check_same_dtype, check_shape
from redline.ops.dispatch import run
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
    """Returns queries and keys rotated by their positions. The tables (see `rope_tables`) have one row per position.

    Without `positions_BS`, token s is at position s. Slices of a larger tensor are read in place.
    """
    op, q, k = "rope", tuple(q_BSHD.shape), tuple(k_BSHD.shape)
    if len(q) != 4 or len(k) != 4 or q[:2] != k[:2] or q[3] != k[3] or q[3] % 2:
        raise ModelError(
            f"{op}: q_BSHD and k_BSHD must be (batch, tokens, heads, head_dim) with an even head_dim, and only their "
            f"heads may differ, not {q} and {k}."
        )
    check_floating(op, q_BSHD=q_BSHD)
    check_same_dtype(op, q_BSHD=q_BSHD, k_BSHD=k_BSHD)
    if cos_SD.ndim != 2 or cos_SD.shape[1] != q[3] // 2:
        raise ModelError(f"{op}: cos_SD must be (positions, {q[3] // 2}), not {tuple(cos_SD.shape)}.")
    check_shape(op, "sin_SD", sin_SD, cos_SD.shape)
    if cos_SD.requires_grad or sin_SD.requires_grad:
        raise ModelError(f"{op}: cos_SD and sin_SD must not require grad. They are constants.")
    if positions_BS is not None:
        check_integers(op, "positions_BS", positions_BS, q[:2])
    elif q[1] > len(cos_SD):
        raise ModelError(f"{op}: the sequence has {q[1]} tokens, but cos_SD has {len(cos_SD)} positions.")
    check_same_device(op, q_BSHD=q_BSHD, k_BSHD=k_BSHD, cos_SD=cos_SD, sin_SD=sin_SD, positions_BS=positions_BS)
    return run(op, implementation, (q_BSHD,), reference.rope, q_BSHD, k_BSHD, cos_SD, sin_SD, positions_BS)
