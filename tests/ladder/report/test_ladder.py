"""The rows: every figure derived from samples, no speed on a red gate, and gaps stay gaps."""

import math
from dataclasses import replace

import pytest

from ladder.report.synthetic_climb import cpu_climb, h200_climb, without_ceilings
from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement
from redline.ladder.report.ladder import format_score, ladder_rows, worst_score


def measured(plan="eager", role="baseline", verdict="baseline", **changes):
    return Measurement(workload="w", plan=plan, role=role, verdict=verdict, reason="why", machine={}, **changes)


BASELINE = measured(samples={"": (1.0, 1.0, 1.0)}, setup_s={"": 1.0}, peak_bytes=100)


def trial(**changes):
    values = {
        "plan": "bf16",
        "role": "trial",
        "verdict": "kept",
        "rung": "bf16",
        "against": "eager",
        "samples": {"": (0.5, 0.5, 0.5)},
        "against_samples": {"": (1.0, 1.0, 1.0)},
        "setup_s": {"": 11.0},
    }
    return measured(**{**values, **changes})


def test_a_row_has_every_figure():
    base, row = ladder_rows([BASELINE, trial(proof={"bf16": "3 weights"}, peak_bytes=50)])
    assert (base.over_start, base.over_last, base.break_even) == (1.0, None, None)
    assert row.time_s == row.low_s == row.high_s == 0.5
    assert row.over_last is not None and row.over_last.middle == pytest.approx(2.0)
    assert row.over_start == pytest.approx(2.0)
    assert row.peak_bytes == 50
    assert row.break_even == pytest.approx(20.0)  # ten seconds more set-up, half a second saved a call
    assert row.proof == "3 weights"


def test_over_start_is_chained_through_interleaved_pairs_and_ignores_drift():
    # By the time of the second trial the machine runs at half its speed; the interleaved arm knows.
    second = trial(
        plan="bf16 + compile",
        rung="compile",
        against="bf16",
        samples={"": (0.5, 0.5, 0.5)},
        against_samples={"": (1.0, 1.0, 1.0)},
    )
    assert ladder_rows([BASELINE, trial(), second])[-1].over_start == pytest.approx(4.0)


def test_a_red_gate_has_no_speed():
    row = ladder_rows(
        [BASELINE, trial(verdict="refused", scores=(Score("relative_error", 0.5, 0.02, "lower", False),))]
    )[-1]
    assert (row.time_s, row.low_s, row.over_last, row.over_start, row.share, row.break_even) == (None,) * 6
    assert row.quality == "relative error 0.5 > 0.02"


def test_a_failure_without_samples_is_a_row():
    row = ladder_rows([BASELINE, measured("bf16", "trial", "failed", rung="bf16")])[-1]
    assert (row.verdict, row.reason, row.time_s, row.setup_s, row.peak_bytes) == (
        "failed",
        "why",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("samples", [{"": ()}, {"": (0.0, 1.0)}, {"": (math.nan,)}, {"": (-1.0,)}])
def test_impossible_samples_give_no_speed(samples):
    assert ladder_rows([BASELINE, trial(samples=samples)])[-1].over_start is None


def test_a_slower_plan_never_breaks_even():
    row = ladder_rows([BASELINE, trial(samples={"": (2.0, 2.0, 2.0)})])[-1]
    assert row.over_start == pytest.approx(0.5)
    assert row.break_even is None


def test_a_single_sample_has_no_interval():
    row = ladder_rows([BASELINE, trial(samples={"": (0.5,)}, against_samples={"": (1.0,)})])[-1]
    assert (row.time_s, row.low_s, row.high_s) == (0.5, None, None)
    assert row.over_start == pytest.approx(2.0)


def test_without_a_baseline_there_is_no_start():
    assert ladder_rows([trial()])[0].over_start is None


def test_shapes_combine_as_a_geometric_mean():
    shapes = {"a": (1.0, 1.0), "b": (8.0, 8.0)}
    plain = trial(samples={"a": (1.0, 1.0), "b": (2.0, 2.0)}, against="", against_samples={})
    assert ladder_rows([replace(BASELINE, samples=shapes), plain])[-1].over_start == pytest.approx(2.0)


def test_the_worst_score_is_the_one_closest_to_its_limit():
    error = Score("relative_error", 0.015, 0.02, "lower", True)
    cosine = Score("cosine", 0.9999, 0.999, "higher", True)
    red = Score("psnr", 20.0, 30.0, "higher", False)
    broken = Score("relative_error", math.nan, 0.02, "lower", False)
    assert worst_score([cosine, error]) is error
    assert worst_score([error, red]) is red
    assert worst_score([red, broken, error]) is broken
    assert worst_score([]) is None
    assert format_score(broken) == "relative error NaN"
    assert format_score(red) == "psnr 20 < 30"


def test_synthetic_climbs_are_whole():
    for climb in (h200_climb(), cpu_climb()):
        rows = ladder_rows(climb)
        assert len(rows) == len(climb)
        assert all(row.share is None for row in ladder_rows(without_ceilings(climb)))
        assert rows[0].share is not None and 0 < rows[0].share < 1
