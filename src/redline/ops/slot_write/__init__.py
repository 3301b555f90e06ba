"""Writes tokens into a bank of slots: merges each into a similar slot, or fills an empty or the lowest-scored slot.

The reference takes about thirty kernel launches per token, `triton.py` two for all tokens. The op modifies nothing in
place.

B: sequences, M: slots, C: tokens, H: heads, D: channels.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_same_dtype, check_sizes
from redline.ops.dispatch import run
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
    op, bank = "slot_write", {f"slots.{name}": tensor for name, tensor in slots._asdict().items()}
    check_sizes(op, key_BCHD=key_BCHD, value_BCHD=value_BCHD, score_BC=score_BC, wanted_BC=wanted_BC, **bank)
    check_same_dtype(op, key=key_BCHD, value=value_BCHD, slot_key=slots.key_BMHD, slot_value=slots.value_BMHD)
    if wanted_BC.is_floating_point():
        raise ModelError(f"{op}: wanted_BC must be boolean, not {wanted_BC.dtype}.")
    supported = (key_BCHD, value_BCHD, score_BC, slots)
    arguments = (slots, key_BCHD, value_BCHD, score_BC, wanted_BC, threshold)
    return run(op, implementation, supported, reference.slot_write, *arguments)
