"""Tests that the compiled kernel has barriers between stores and loads of different threads."""

from collections.abc import Callable
from typing import Any

import torch

from redline.ops.slot_write import slot_write

from ..samples import slot_write as sample


def test_stores_are_followed_by_barriers(on_card: Callable[..., Any]) -> None:
    with on_card(90, compiling=True) as launched:
        slot_write(**sample(torch.bfloat16))
    assert "bar.sync" in launched["write_kernel"].asm["ptx"]
