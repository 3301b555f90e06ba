"""Tests which arguments of slot write are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.slot_write import slot_write

from .one_by_one import example


def test_invalid_arguments_are_refused() -> None:
    slots, (keys, values, scores, wanted) = example(2, 4, 3, 1, 4, torch.float32, 0.5)
    for held, offered, words in (
        (slots, (keys[:1], values, scores, wanted), r"value_BCHD must have shape \(1,"),
        (slots, (keys, values, scores[:, :2], wanted), "score_BC must have shape"),
        (slots, (keys[..., :3], values[..., :3], scores, wanted), "slots.key_BMHD must have shape"),
        (slots._replace(mass_BM=slots.mass_BM[:, :3]), (keys, values, scores, wanted), "slots.mass_BM must have shape"),
        (slots, (keys.half(), values, scores, wanted), "but key is torch.float16"),
        (slots, (keys, values, scores, wanted.float()), "wanted_BC must be boolean"),
    ):
        with pytest.raises(ModelError, match=words):
            slot_write(held, *offered, 0.9)
