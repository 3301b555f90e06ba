"""Tokens into a bank of slots: merged into what is like them, put into empty slots, or in the place of the least.

`reference.py` is the specification, `triton.py` takes two launches where that takes some thirty for every token.
Nothing is changed in place.
"""

from torch import Tensor

from redline.errors import ModelError
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
    """The bank after the tokens, of which only those that are `wanted_BC` count, and what became of them."""
    _check(slots, key_BCHD, value_BCHD, score_BC, wanted_BC)

    def why_not() -> str:
        from redline.ops.slot_write import triton

        return triton.why_not(slots, key_BCHD, value_BCHD, score_BC)

    arguments = (slots, key_BCHD, value_BCHD, score_BC, wanted_BC, threshold)
    if choose("slot write", implementation, key_BCHD.device, why_not) == "triton":
        from redline.ops.slot_write import triton

        return triton.slot_write(*arguments)
    return reference.slot_write(*arguments)


def _check(slots: Slots, key: Tensor, value: Tensor, score: Tensor, wanted: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (key, value, score, wanted)]
    held = [tuple(tensor.shape) for tensor in slots]
    fits = key.ndim == len(held[0]) == 4 and shapes[0] == shapes[1] and shapes[2] == shapes[3] == shapes[0][:2]
    vectors, scalars = held[:2], held[2:]
    if not fits or vectors != [(shapes[0][0], held[0][1], *shapes[0][2:])] * 2 or set(scalars) != {held[0][:2]}:
        raise ModelError(f"a bank of shapes {held} cannot take in tokens of shapes {shapes}.")
    if len({tensor.dtype for tensor in (key, value, *slots[:2])}) > 1 or wanted.is_floating_point():
        raise ModelError("a bank takes keys and values of its own dtype, and says of each token whether it is wanted.")
