"""Tests each finding at its limit and just beyond it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from redline.evaluation.drift.case_run import CaseRun
from redline.evaluation.drift.findings import Finding, judge
from redline.evaluation.drift.metrics import NAMES

FRAMES = 80
GOOD = dict.fromkeys(NAMES, 0.0) | {
    "distance": 0.2,
    "change": 0.1,
    "gain_db": 2.0,
    "input_flicker": 0.02,
    "response": 1.0,
}


def watched(late: dict[str, float] | None = None, cut: int | None = None, **always: float) -> CaseRun:
    """`late` replaces metrics in the second half of the frames."""
    good = {**GOOD, **always}
    rows = tuple({**good, **(late or {})} if frame >= FRAMES // 2 else dict(good) for frame in range(FRAMES))
    return CaseRun("case", cut, rows, (good,) * 5, dict.fromkeys((70, 75), good))


def findings(seen: CaseRun) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(seen)}


def test_a_good_model_passes_everything() -> None:
    found = judge(watched())
    assert all(finding.holds for finding in found) and len(found) == 12
    assert [finding.name for finding in found][:3] == ["follows its input", "does something", "reacts to its input"]
    assert "gets over a cut" in findings(watched(cut=30))


@pytest.mark.parametrize(
    ("name", "late", "limit"),
    [
        ("colour drift", "red", 0.05),
        ("colour drift", "blue", -0.05),
        ("contrast drift", "contrast", -0.1),
        ("detail drift", "detail", 0.25),
        ("structure drift", "distance", 0.05),
        ("flicker drift", "flicker", 0.01),
        ("gain drift", "gain_db", -0.5),
        ("colour feedback", "green", 0.05),
    ],
)
def test_a_drift_fails_beyond_its_limit(name: str, late: str, limit: float) -> None:
    inside = findings(watched({late: GOOD[late] + 0.9 * limit}))[name]
    beyond = findings(watched({late: GOOD[late] + 1.1 * limit}))[name]
    assert inside.holds and not beyond.holds
    assert beyond.value == pytest.approx(1.1 * abs(limit)) and beyond.limit == abs(limit)
    if name != "colour feedback":
        assert beyond.since_first == pytest.approx(1.1 * (abs(limit) if name == "gain drift" else limit))


def test_what_gets_better_is_no_drift() -> None:
    assert findings(watched({"distance": 0.0}))["structure drift"].holds
    assert findings(watched({"gain_db": 9.0}))["gain drift"].holds
    assert findings(watched({"flicker": -0.5}))["flicker drift"].holds


@pytest.mark.parametrize(
    ("name", "figure", "holds", "fails"),
    [
        ("follows its input", "distance", 0.75, 0.76),
        ("does something", "change", 0.51 / 255, 0.49 / 255),
        ("reacts to its input", "response", 0.2, 0.19),
        ("gain", "gain_db", 0.01, 0.0),
        ("steadier than its input", "flicker", 0.02, 0.021),
    ],
)
def test_every_metric_has_a_limit(name: str, figure: str, holds: float, fails: float) -> None:
    assert findings(watched(**{figure: holds}))[name].holds
    assert not findings(watched(**{figure: fails}))[name].holds


def test_the_least_response_counts_and_frames_without_a_probe_do_not() -> None:
    seen = watched({"response": math.nan})
    assert findings(seen)["reacts to its input"].holds
    rows = (*seen.rows[:-1], {**seen.rows[-1], "response": 0.1})
    assert not findings(replace(seen, rows=rows))["reacts to its input"].holds
    assert not findings(watched(response=math.nan))["reacts to its input"].holds


def test_figures_that_are_not_known_are_not_judged() -> None:
    names = findings(watched(flicker=math.nan, gain_db=math.nan))
    assert not {"steadier than its input", "flicker drift", "gain", "gain drift"} & set(names)


@pytest.mark.parametrize("figure", ["red", "contrast", "distance"])
def test_a_figure_that_is_no_number_fails(figure: str) -> None:
    assert not all(finding.holds for finding in judge(watched({figure: math.nan})))


@pytest.mark.parametrize(("extra", "holds"), [(0.04, True), (0.06, False)])
def test_nothing_of_the_old_scene_is_left_after_a_cut(extra: float, holds: bool) -> None:
    seen = watched(cut=30)
    rows: Any = [dict(row) for row in seen.rows]
    for frame in range(30 + 8, 30 + 16):
        rows[frame]["distance"] += extra
    assert findings(replace(seen, rows=tuple(rows)))["gets over a cut"].holds is holds
    for frame in (*range(30, 38), *range(46, 48)):  # before it has settled, and later
        rows[frame]["distance"] += 0.2
    changed = findings(replace(seen, rows=tuple(rows)))["gets over a cut"]
    assert changed.value == pytest.approx(extra - 2 * 0.2 / (FRAMES - 46))


def test_the_first_and_the_last_tenth() -> None:
    assert watched().first == range(8, 15) and watched().last == range(73, 80)
    assert watched(cut=30).first == range(38, 42) and watched(cut=30).last == range(76, 80)
    few = replace(watched(), rows=watched().rows[:4])
    assert few.first == range(2, 3) and few.last == range(3, 4)
