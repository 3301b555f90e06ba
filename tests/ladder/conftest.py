"""Fixtures of climbs and verifications: planted rungs, lent workers, and no ceilings."""

import contextlib
from collections.abc import Iterator

import pytest

import planted_rungs
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.search.history import History
from redline.ladder.search.preparation import ask_machine
from redline.machine.machine import Machine


@pytest.fixture
def planted() -> Iterator[None]:
    planted_rungs.plant()
    yield
    planted_rungs.uproot()


@pytest.fixture(scope="module")
def no_ceilings() -> Iterator[None]:
    """They take seconds, and no verdict here asks for them; `cli/test_climb` climbs with them."""

    def ask(pool: WorkerPool, device: str, measure: bool = True) -> Machine:
        return ask_machine(pool, device, measure=False)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("redline.ladder.search.trials", "redline.ladder.verify"):
            patch.setattr(f"{module}.ask_machine", ask)
        yield


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a climb does not depend on the climbs of other tests."""
    monkeypatch.setattr(History, "of", lambda machine: History())


@pytest.fixture
def lent_workers(monkeypatch: pytest.MonkeyPatch, lent_pool: WorkerPool) -> None:
    for module in ("redline.ladder.search.climb", "redline.ladder.verify"):
        monkeypatch.setattr(f"{module}.WorkerPool", lambda: contextlib.nullcontext(lent_pool))
