"""Tests that the reference is bit-identical to rebuilding the bank for every token, and its gradients."""

import pytest
import torch

from redline.ops.slot_write import Slots, reference

from .one_by_one import Sizes, example, one_by_one

SIZES = [(3, 12, 20, 2, 8), (1, 5, 1, 1, 3), (2, 33, 40, 3, 5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("filled", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_agrees_with_writing_one_token_at_a_time(sizes: Sizes, filled: float, dtype: torch.dtype) -> None:
    slots, offered = example(*sizes, dtype, filled)
    before = [tensor.clone() for tensor in slots]
    after, written = reference.slot_write(slots, *offered, 0.85)
    expected, became = one_by_one(slots, offered, 0.85)
    for name, one in expected._asdict().items():
        assert torch.equal(getattr(after, name), one), name
    assert [one.tolist() for one in written] == [one.tolist() for one in became]
    assert all(torch.equal(one, other) for one, other in zip(slots, before, strict=True))


def test_the_examples_cover_every_outcome() -> None:
    slots, offered = example(3, 12, 20, 2, 8, torch.float32, 1.0)
    _, written = reference.slot_write(slots, *offered, 0.85)
    assert all(one.sum() > 0 for one in written)
    assert (written.placed_B + written.merged_B < offered[3].sum(1)).any()  # and some are not wanted


def test_gradients_flow_through_merges_and_fills() -> None:
    slots, (keys, values, scores, wanted) = example(2, 6, 9, 1, 4, torch.float64, 0.7)
    trained = [tensor.requires_grad_() for tensor in (slots.key_BMHD, slots.value_BMHD, slots.score_BM, keys, values)]

    def through(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        after, _ = reference.slot_write(Slots(*inputs[:3], *slots[3:]), inputs[3], inputs[4], scores, wanted, 0.85)
        return after.key_BMHD, after.value_BMHD, after.score_BM

    assert torch.autograd.gradcheck(through, trained)
