"""The kernel that benchmarks switch on, which makes the loss and its gradient in one pass, compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redline.ops.linear_cross_entropy import linear_cross_entropy
from redline.ops.samples import linear_cross_entropy as sample

chunks = pytest.importorskip("redline.ops.linear_cross_entropy.chunks")


def test_one_pass_compiles(on_card: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ONE_PASS", True)
    given = sample(torch.bfloat16)
    given["weight_VD"].requires_grad_()
    with on_card(90, compiling=True) as launched:
        linear_cross_entropy(**given)
    assert launched["both_kernel"]
