"""Memory that works: small models learn to find needles within minutes on a CPU, and the same without memory do not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from redline.recall import Needle

from .learning import WINDOW, learned, recalled, with_slots


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products are no faster on two threads, and other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_bank_of_slots_finds_needles_at_sixteen_times_the_length() -> None:
    task = Needle()
    model = learned(replace(WINDOW, memory_slots=16), task, 128, 200, 32, 1e-2, score_after=60)
    found = recalled(model, task, 2048, 16)
    assert found >= 0.95
    # Three needles do not fit into two slots.
    assert recalled(with_slots(model, 2), task, 2048, 16) <= found - 0.2


def test_a_window_alone_finds_no_needles() -> None:
    task = Needle()
    assert recalled(learned(WINDOW, task, 128, 100, 32, 1e-2), task, 128) <= 0.2
