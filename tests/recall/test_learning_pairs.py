"""Memory that works: small models learn to recall pairs within minutes on a CPU, and the same without memory do not."""

from collections.abc import Iterator

import pytest
import torch

from redline.recall import Mqar

from .learning import NEURAL, WINDOW, learned, recalled


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products are no faster on two threads, and other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_neural_memory_recalls_pairs_at_eight_times_the_length() -> None:
    task = Mqar()
    model = learned(NEURAL, task, 64, 200, 64, 2e-2)
    assert recalled(model, task, 64) >= 0.99
    assert recalled(model, task, 512) >= 0.95


def test_a_window_alone_does_not_recall_pairs() -> None:
    task = Mqar()
    assert recalled(learned(WINDOW, task, 64, 100, 64, 2e-2), task, 64) <= 0.2
