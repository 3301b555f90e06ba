"""What the tests use to see that nobody waits for a GPU: it sees it, and no test can leave it on."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

Watch = Callable[[], AbstractContextManager[None]]


def test_the_mode_is_put_back_whatever_happens(monkeypatch: pytest.MonkeyPatch, waits_for_nobody: Watch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature and does not detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ValueError, match="inside"), waits_for_nobody():
        raise ValueError("inside")
    assert modes == ["error", "default"]


@pytest.mark.gpu
def test_waiting_is_seen(waits_for_nobody: Watch) -> None:
    number = torch.ones(1, device="cuda")
    with waits_for_nobody():
        number += 1
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"), waits_for_nobody():
        number.item()
    assert number.item() == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_one_test_leaves_it_on() -> None:
    torch.cuda.set_sync_debug_mode("error")


@pytest.mark.gpu
def test_and_the_next_may_wait() -> None:
    assert torch.ones(1, device="cuda").item() == 1
