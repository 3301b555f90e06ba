"""Writes tokens into a bank of slots: merges a token into a similar slot, or fills an empty or the worst slot.

`reference.py` is the specification in plain PyTorch, about thirty kernel launches per token; `triton.py` needs two for
all tokens. The op modifies nothing in place.

B: sequences, M: slots, C: tokens, H: heads, D: channels.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_same_dtype, check_shape
from redline.ops.dispatch import choose
from redline.ops.slot_write import reference
from redline.ops.slot_write.reference import Slots, Written

__all__ = ["Slots", "Written", "slot_write"]


def slot_write(
    slots: Slots,
    key_BCHD: Tensor,
    value_BCHD: Tensor,
    score_BC: Tensor,
    wanted_BC: Tensor,
    threshold: float,
    implementation: str = "auto",
) -> tuple[Slots, Written]:
    """Returns the bank after writing the tokens that are marked in `wanted_BC`, and counts of what was written."""
    _check(slots, key_BCHD, value_BCHD, score_BC, wanted_BC)

    def why_not() -> str:
        return _triton().why_not(slots, key_BCHD, value_BCHD, score_BC)

    arguments = (slots, key_BCHD, value_BCHD, score_BC, wanted_BC, threshold)
    if choose("slot_write", implementation, key_BCHD.device, why_not) == "triton":
        return _triton().slot_write(*arguments)
    return reference.slot_write(*arguments)


def _triton():
    from redline.ops.slot_write import triton  # imports Triton

    return triton


def _check(slots: Slots, key: Tensor, value: Tensor, score: Tensor, wanted: Tensor) -> None:
    op = "slot_write"
    if key.ndim != 4 or slots.key_BMHD.ndim != 4:
        shapes = f"{tuple(key.shape)} and {tuple(slots.key_BMHD.shape)}"
        raise ModelError(f"{op}: key_BCHD and slots.key_BMHD must have 4 dimensions, not {shapes}.")
    batch, tokens, heads, dim = key.shape
    count = slots.key_BMHD.shape[1]
    check_shape(op, "value_BCHD", value, key.shape)
    check_shape(op, "score_BC", score, (batch, tokens))
    check_shape(op, "wanted_BC", wanted, (batch, tokens))
    shapes = [(batch, count, heads, dim)] * 2 + [(batch, count)] * 4
    for name, tensor, shape in zip(slots._fields, slots, shapes, strict=True):
        check_shape(op, f"slots.{name}", tensor, shape)
    check_same_dtype(op, key=key, value=value, slot_key=slots.key_BMHD, slot_value=slots.value_BMHD)
    if wanted.is_floating_point():
        raise ModelError(f"{op}: wanted_BC must be boolean, not {wanted.dtype}.")
