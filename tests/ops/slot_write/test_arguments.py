"""Arguments of slot write that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.slot_write import slot_write

from .one_by_one import example


def test_what_does_not_fit_is_refused() -> None:
    slots, (keys, values, scores, wanted) = example(2, 4, 3, 1, 4, torch.float32, 0.5)
    for held, offered, words in (
        (slots, (keys[:1], values, scores, wanted), "cannot take in"),
        (slots, (keys, values, scores[:, :2], wanted), "cannot take in"),
        (slots, (keys[..., :3], values[..., :3], scores, wanted), "cannot take in"),
        (slots._replace(mass_BM=slots.mass_BM[:, :3]), (keys, values, scores, wanted), "cannot take in"),
        (slots, (keys.half(), values, scores, wanted), "of its own dtype"),
        (slots, (keys, values, scores, wanted.float()), "whether it is wanted"),
    ):
        with pytest.raises(ModelError, match=words):
            slot_write(held, *offered, 0.9)
