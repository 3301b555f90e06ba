"""The story of a climb: which row is the final plan, what the headline claims, which run is told."""

from dataclasses import replace

import pytest

from ladder.report.synthetic_climb import cpu_climb, h200_climb, training_climb
from redline.errors import MeasurementError
from redline.ladder.report.climb import Climb, choose_run


def test_headline_of_a_whole_climb():
    climb = Climb.of(h200_climb())
    assert climb.final is not None and climb.final.row.verdict == "kept"
    assert climb.compiled is not None and climb.compiled.row.plan == "compile(mode=max-autotune)"
    # From the samples of the same race, not from minutes apart.
    assert climb.over_compiled == pytest.approx(4.94 / 1.66, rel=0.02)
    assert (
        climb.headline()
        == "4.94× faster than eager, 2.97× faster than torch.compile, 43% less memory, within all gates."
    )


def test_memory_comes_first_when_it_was_the_objective():
    assert Climb.of(training_climb()).headline().startswith("70% less memory, 1.90× faster than eager")


def test_the_final_plan_is_found_after_the_plans_it_was_compared_with():
    climb = h200_climb()
    climb[-1], climb[-2] = climb[-2], climb[-1]
    final = Climb.of(climb).final
    assert final is not None and final.row.plan.endswith("cuda_graph") and final.label == "final plan"


def test_an_interrupted_climb_says_so():
    climb = [m for m in h200_climb() if m.role in ("baseline", "compile", "trial")]
    assert Climb.of(climb).headline().startswith("Interrupted before the final measurement; best so far: 4.9")
    assert "Only the baseline" in Climb.of(climb[:1]).headline()


def test_headline_if_no_rung_helped():
    climb = cpu_climb()
    final = replace(climb[-1], plan="eager", samples=climb[0].samples, verdict="kept")
    assert Climb.of([climb[0], final]).headline().startswith("No plan was better than the original model")


def test_a_slower_and_a_larger_plan_are_called_that():
    climb = cpu_climb()
    slower = replace(climb[-1], samples={"": tuple(3 * s for s in climb[0].samples[""])}, peak_bytes=2**30)
    text = Climb.of([climb[0], slower]).headline()
    assert "slower than eager" in text and "more memory" in text


def test_a_red_gate_is_in_the_headline():
    climb = cpu_climb()
    red = replace(climb[-1].scores[0], value=0.5, passed=False)
    assert (
        "fails its gate on relative error, so no speed is reported"
        in Climb.of([climb[0], replace(climb[-1], scores=(red,))]).headline()
    )


def test_the_latest_run_unless_another_is_named():
    both = h200_climb(run="aa11") + cpu_climb(run="ab22")
    assert {m.run for m in choose_run(both)} == {"ab22"}
    assert {m.run for m in choose_run(both, "aa11")} == {m.run for m in choose_run(both, "aa")} == {"aa11"}
    with pytest.raises(MeasurementError, match="no run in this file starts with 'zz': choose one of 'aa11', 'ab22'"):
        choose_run(both, "zz")
    with pytest.raises(MeasurementError, match="several runs in this file start with 'a'"):
        choose_run(both, "a")
    with pytest.raises(MeasurementError, match="no measurement"):
        choose_run([])
