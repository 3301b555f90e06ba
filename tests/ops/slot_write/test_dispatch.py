"""What is chosen and refused."""

import pytest
import torch

from redline.errors import MachineError, ModelError
from redline.ops import dispatch
from redline.ops.slot_write import slot_write

from .one_by_one import example


def test_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, offered = example(1, 4, 3, 1, 4, torch.float32, 0.5)
    with pytest.raises(ModelError, match="no implementation 'fast'"):
        slot_write(slots, *offered, 0.9, "fast")
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    with pytest.raises(MachineError, match="slot write by Triton cannot run: it is not installed"):
        slot_write(slots, *offered, 0.9, "triton")


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
