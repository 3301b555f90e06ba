"""Verification: the rungs that no longer hold are named."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from redline.ladder.measuring.trial import Arm, TrialSpec, take_turns
from redline.ladder.verify import verify

OPTIONS: dict[str, Any] = {"device": "cpu", "timeout": 30, "sampling": 1, "progress": None}
pytestmark = pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers")
TINY = str(Path(__file__).parents[1] / "tiny_workloads.py")
PLANTED = str(Path(__file__).parents[1] / "planted_rungs.py")


@pytest.mark.usefixtures("without_compiler")
def test_verify_names_the_rungs_that_no_longer_hold() -> None:
    seen = verify("planted_fast + planted_useless", f"{PLANTED}:ticks", **OPTIONS)
    assert not seen.holds and "planted_useless" in seen.reason
    assert [(r.rung, r.holds) for r in seen.rungs] == [("planted_fast", True), ("planted_useless", False)]
    assert seen.speedup is not None and seen.speedup.above(1.5)
    good = verify("planted_fast", f"{PLANTED}:ticks", **OPTIONS)
    assert good.holds
    red = verify("planted_fast + planted_wrong", f"{PLANTED}:ticks", **OPTIONS)
    assert not red.holds and "outside the gate" in red.reason
    assert {r.rung: r.holds for r in red.rungs}["planted_wrong"] is False
    gone = verify("tf32", f"{PLANTED}:ticks", **OPTIONS)
    assert not gone.holds and "cannot run here" in gone.reason


@pytest.mark.usefixtures("without_compiler")
def test_plan_whose_process_dies_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(arms: list[Arm], spec: TrialSpec, **about: float) -> object:
        os.kill(arms[-1].worker.pid, signal.SIGKILL)
        return take_turns(arms, spec, **about)

    monkeypatch.setattr("redline.ladder.verify.take_turns", take)
    seen = verify("planted_fast", f"{PLANTED}:ticks", **OPTIONS)
    assert not seen.holds and seen.reason.startswith("the plan failed while it was timed: ") and seen.speedup is None
