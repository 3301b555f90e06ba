"""The time that is reserved for the final race."""

from dataclasses import replace
from typing import Any

import pytest

from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import TrialSpec
from redline.ladder.objective import Objective
from redline.ladder.plan import Plan
from redline.ladder.search.estimates import Estimates
from redline.ladder.search.history import History
from redline.ladder.search.incumbent import Incumbent
from redline.ladder.search.race_time import race_s, slow_step_s

SPEC = TrialSpec("a workload", {"": {}}, "cpu", {})


def row(plan: str, step_s: float, against: str = "", against_s: float = 0.0) -> Measurement:
    other = {"": (against_s,) * 4} if against else {}
    return Measurement(
        "w", plan, "trial", "", "", {}, samples={"": (step_s,) * 4}, against=against, against_samples=other
    )


def test_load_that_slowed_the_model_down_in_a_trial_may_come_again() -> None:
    rows = [row("eager", 0.1)]
    assert slow_step_s(rows) == pytest.approx(0.1)
    rows += [row("threads", 0.1, "eager", 0.9), row("bf16", 5.0, "threads", 5.0)]
    assert slow_step_s(rows) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("step_s", "objective", "turns_s"),
    [
        (0.01, Objective.LATENCY, 7.0),  # the time allowed
        (1.0, Objective.LATENCY, 8.0),  # eight turns
        (3.0, Objective.LATENCY, 13.5),  # fewer turns, which end half a time late
        (3.0, Objective.P99, 3000.0),  # every call counts
    ],
)
def test_the_race_of_two_plans(step_s: float, objective: Objective, turns_s: float) -> None:
    nothing: Any = None
    incumbent = Incumbent(nothing, SPEC, 10**9, print)
    incumbent.is_alive = lambda plan: True
    estimates = Estimates(History(), "digest", 100, False)
    estimates.open_s = 2.0
    judging_s = 1.0 + max(1.0, 3 * step_s)
    expected_s = race_s([row("eager", step_s)], replace(SPEC, objective=objective), estimates, incumbent, 7.0)
    assert expected_s == pytest.approx(judging_s + turns_s)
    incumbent.is_alive = lambda plan: plan != Plan()
    again_s = race_s([row("eager", step_s)], replace(SPEC, objective=objective), estimates, incumbent, 7.0)
    assert again_s == pytest.approx(expected_s + estimates.trial_s(Plan()))
