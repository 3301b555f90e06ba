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


def kept(*failing: str, memory_bytes: int = 10**6) -> tuple[Any, Opener, list[str]]:
    opener, told = Opener(*failing), []
    return Incumbent(opener, SPEC, memory_bytes, told.append), opener, told


def test_an_arm_is_opened_when_first_needed_and_stays() -> None:
    plans, opener, _ = kept()
    assert plans.arm() is plans.arm() and opener.opened == ["eager"]
    plans.replace_plan(Plan.parse("bf16"))
    assert str(plans.arm().plan) == "bf16" and opener.opened == ["eager", "bf16"]


def test_a_candidate_that_is_kept_takes_over_and_is_not_opened_again() -> None:
    plans, opener, _ = kept()
    before, candidate = plans.arm(), fake_arm("bf16", pid=9)
    plans.keep_alive(candidate)
    plans.replace_plan(Plan.parse("bf16"))
    assert plans.arm() is candidate and opener.opened == ["eager"]
    # The plan before it stays alive for the final race, which closes both.
    assert not before.worker.stopped and plans.release() == {Plan(): before, Plan.parse("bf16"): candidate}
    assert plans.alive_count == 0


def climb_on(plans: Any, *names: str) -> dict[str, Any]:
    """Each plan takes the place of the one before."""
    arms = {"eager": plans.arm()}
    for number, name in enumerate(names, 10):
        arms[name] = fake_arm(name, pid=number, peak_bytes=1000)
        arms[name].peak_bytes = 1000
        plans.keep_alive(arms[name])
        plans.replace_plan(Plan.parse(name))
    return arms


@pytest.mark.parametrize(
    ("memory_bytes", "stopped"),
    [(10**6, ["bf16"]), (8000, ["bf16", "fp16"]), (6000, ["eager", "bf16", "fp16"]), (100, ["eager", "bf16", "fp16"])],
)
def test_the_memory_bounds_the_processes_that_stay_alive(memory_bytes: int, stopped: list[str]) -> None:
    plans, _, _ = kept(memory_bytes=memory_bytes)
    arms = climb_on(plans, "bf16", "fp16", "compile", "compile(freeze=true)")
    # Whatever the memory, the incumbent stays, beside the plan that it replaced.
    assert [name for name, arm in arms.items() if arm.worker.stopped] == stopped


def test_other_plans_are_ended_when_memory_is_short() -> None:
    plans, _, _ = kept()
    arms = climb_on(plans, "bf16")
    plans.close_others()
    assert arms["eager"].worker.stopped and not arms["bf16"].worker.stopped


def test_previous_plan_replaces_one_that_does_not_run_again() -> None:
    plans, _, told = kept("bf16")
    plans.replace_plan(Plan.parse("bf16"))
    with pytest.raises(WorkerFailed, match="cannot be set up again .* so eager replaces it") as failure:
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
