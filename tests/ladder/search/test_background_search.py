"""A search for kernels in the background: it stands still while plans are timed, and its end is waited for."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_arms import fake_arm
from patience import PATIENCE_S
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search import background_search
from redline.ladder.search.background_search import BackgroundSearch

PLAN = Plan.parse("bf16 + compile(mode=max-autotune)")


class Searching:
    """`open_arm` of a search whose worker is a busy process with a busy child; it ends when the test says so."""

    def __init__(self) -> None:
        burn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while 1: pass'])\nwhile 1: pass"
        self.process = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True)
        self.done, self.fails = threading.Event(), False

    def open_arm(self, pool: Any, spec: Any, plan: Plan, seeds: Any, timeout_s: float, started: Any) -> Any:
        started(SimpleNamespace(pid=self.process.pid, end=lambda reason: self.end()))
        self.done.wait(PATIENCE_S)
        if self.fails:
            raise WorkerFailed("timeout", "no result")
        return fake_arm(str(plan))

    def end(self) -> None:
        self.fails = True
        self.done.set()

    def states(self) -> set[str]:
        """The states of all processes of the search: R runs, T is stopped."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid:
                found.add(fields[0])
        return found

    def reach(self, state: str) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self.states() == {state}:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Searching]:
    found = Searching()
    monkeypatch.setattr(background_search, "open_arm", found.open_arm)
    yield found
    found.done.set()
    background_search.os.killpg(found.process.pid, 9)
    found.process.wait()


def started() -> BackgroundSearch:
    search = BackgroundSearch(None, None)
    search.start(PLAN, 60.0)
    return search


def test_it_stands_still_while_plans_are_timed(searching: Searching) -> None:
    search = started()
    assert searching.reach("R") and search.is_running
    with pytest.raises(ZeroDivisionError), search.paused():
        assert searching.reach("T")
        raise ZeroDivisionError
    assert searching.reach("R")
    searching.done.set()
    assert search.plan == PLAN and search.take().plan == PLAN
    assert not search.is_running and search.plan is None
    with search.paused():  # nothing to pause
        assert searching.reach("R")


def test_a_search_can_be_ended_and_may_fail(searching: Searching) -> None:
    search = started()
    search.stop()
    assert searching.fails and search.plan is None and not search.is_running
    search.start(PLAN, 60.0)
    with pytest.raises(WorkerFailed, match="no result"):
        search.take()
