"""The incumbent plan is set up once, and replaced by the previous plan if it does not run again."""

from typing import Any

import pytest

from fake_arms import fake_arm
from redline.errors import WorkloadError
from redline.ladder.measuring.trial import TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.incumbent import Incumbent

SPEC = TrialSpec("a workload", {"": {}}, "cpu", {})


class Opener:
    """Opens any plan but those that fail."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.opened = failing, []

    def open(self, plan: Any) -> Any:
        self.opened.append(str(plan))
        if str(plan) in self.failing:
            raise WorkerFailed("oom", "no memory")
        return fake_arm(str(plan), pid=len(self.opened))


def kept(*failing: str) -> tuple[Any, Opener, list[str]]:
    opener, told = Opener(*failing), []
    return Incumbent(opener, SPEC, told.append), opener, told  # pyright: ignore[reportArgumentType]


def test_an_arm_is_opened_when_first_needed_and_stays() -> None:
    plans, opener, _ = kept()
    assert plans.arm() is plans.arm() and opener.opened == ["eager"]
    first = plans.arm()
    plans.replace_plan(Plan.parse("bf16"))
    assert str(plans.arm().plan) == "bf16" and first.worker.stopped and opener.opened == ["eager", "bf16"]


def test_a_candidate_that_is_kept_takes_over_and_is_not_opened_again() -> None:
    plans, opener, _ = kept()
    before, candidate = plans.arm(), fake_arm("bf16", pid=9)
    plans.take_over(candidate)
    plans.replace_plan(Plan.parse("bf16"))
    assert plans.arm() is candidate and before.worker.stopped and opener.opened == ["eager"]


def test_previous_plan_replaces_one_that_does_not_run_again() -> None:
    plans, _, told = kept("bf16")
    plans.replace_plan(Plan.parse("bf16"))
    with pytest.raises(WorkerFailed, match="does not run again .* so eager takes its place") as failure:
        plans.arm()
    assert failure.value.kind == "lost" and len(told) == 1
    assert str(plans.plan) == "eager" and str(plans.arm().plan) == "eager"


def test_eager_that_does_not_run_again_is_an_error() -> None:
    plans, _, _ = kept("eager")
    with pytest.raises(WorkloadError, match="a workload under eager: no memory"):
        plans.arm()


def test_lost_process_is_recognized_by_its_pid() -> None:
    plans, opener, _ = kept()
    assert not plans.lost_process(WorkerFailed("crash", "killed", 1))
    arm = plans.arm()
    assert not plans.lost_process(WorkerFailed("crash", "killed", arm.worker.pid + 1))
    assert plans.lost_process(WorkerFailed("crash", "killed", arm.worker.pid)) and arm.worker.stopped
    assert plans.arm() is not arm and opener.opened == ["eager", "eager"]
