"""Budgets, targets, objectives, shapes, and what a climb refuses."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError, WorkloadError
from redline.ladder.measuring.trial import Arm, TrialSpec
from redline.ladder.objective import Objective
from redline.ladder.plan import Plan
from redline.ladder.report import Climb
from redline.ladder.search import estimates
from redline.ladder.search.climb import climb
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.trials import Trials
from redline.ladder.statistics import Interval
from redline.machine.load import Load
from redline.machine.machine import Machine

pytestmark = pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers")
TINY = str(Path(__file__).parents[2] / "tiny_workloads.py")
PLANTED = str(Path(__file__).parents[2] / "planted_rungs.py")


def verdicts(climbed: Climbed, role: str = "trial") -> dict[str, tuple[str, str]]:
    return {m.rung: (m.verdict, m.reason) for m in climbed.measurements if m.role == role}


@pytest.mark.usefixtures("without_compiler")
def test_trial_stopped_by_the_budget_is_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 0.5)
    monkeypatch.setattr("redline.ladder.search.budget._PATIENCE", 1.0)
    verdict, reason = verdicts(
        climb(
            f"{PLANTED}:ticks",
            out=tmp_path,
            device="cpu",
            rungs=("planted_hang",),
            budget=60,
            sampling=1,
            progress=None,
        )
    )["planted_hang"]
    assert verdict == "unmeasured" and "to stay within the budget" in reason


@pytest.mark.usefixtures("without_compiler")
def test_unfinished_kernel_search_is_not_repeated_with_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(estimates._SETUP_S, "search", (1.0, 0.0))
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 5.0)
    only = ("planted_search(mode=max-autotune)", "planted_search(mode=max-autotune, wide=true)")
    (_, first), (verdict, second) = verdicts(
        climb(f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=only, budget=16, sampling=1, progress=None)
    ).values()
    assert "to stay within the budget" in first
    # Beside other load, the first search may leave nothing of the budget.
    not_started = r"it takes about \d+ s, and \d+ s of the budget are left|the budget was spent"
    assert verdict == "unmeasured" and re.fullmatch(not_started, second)


def test_too_small_a_budget_for_the_compiler_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(estimates._SETUP_S, "compile", (500.0, 0.0))
    heard: list[str] = []
    result = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=("compile", "planted_fast"),
        budget=20,
        progress=lambda text, row: heard.append(text),
    )
    (advice,) = [text for text in heard if "too small for torch.compile" in text]
    enough = re.search(r"a budget of (\d+) s would be enough", advice)
    assert enough is not None and int(enough[1]) >= 620
    assert advice in result.final.notes and str(result.plan) == "planted_fast"
    assert "torch.compile was not measured" in Climb.of(result.measurements).headline()
    assert all(not row.samples for row in result.measurements if "compile" in row.plan)


@pytest.mark.usefixtures("without_compiler")
def test_the_budget_is_kept_with_its_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging rung would take minutes; what is left for the race is kept."""
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 4.0)
    start_s = time.monotonic()
    rungs = ("planted_hang", "planted_fast", "planted_slow")
    result = climb(f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=rungs, budget=20, progress=None)
    assert time.monotonic() - start_s < 20 * 1.05
    assert str(result.plan) == "planted_fast" and result.final.role == "final"


@pytest.mark.usefixtures("without_compiler")
def test_a_target_stops_the_climb(tmp_path: Path) -> None:
    result = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=("planted_fast", "planted_fixed"),
        target="5ms",
        sampling=1,
        ablation=False,
        progress=None,
    )
    assert str(result.plan) == "planted_fast"
    assert verdicts(result)["planted_fixed"] == ("unmeasured", "the target was reached")
    assert result.target.startswith("5 ms was reached: ") and not result.missed_target
    assert result.plan.objective == "latency"


@pytest.mark.usefixtures("without_compiler")
def test_spent_budget_still_ends_with_a_final_race(tmp_path: Path) -> None:
    """The references alone take longer than this budget: a rung that would be kept is not tried."""
    result = climb(
        f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=("planted_fixed",), budget=0.05, sampling=1, progress=None
    )
    assert verdicts(result) == {"planted_fixed": ("unmeasured", "the budget was spent")}
    assert [(m.role, m.plan) for m in result.measurements if m.samples] == [("baseline", "eager"), ("final", "eager")]
    assert str(result.plan) == "eager" and result.final.verdict == "kept"


@pytest.mark.usefixtures("without_compiler")
def test_training_is_gated_on_loss_and_gradients(tmp_path: Path) -> None:
    result = climb(
        f"{TINY}:training",
        out=tmp_path,
        device="cpu",
        rungs=("fused_optimizer",),
        sampling=0.2,
        timeout=60,
        progress=None,
    )
    baseline = result.measurements[0]
    assert {score.metric for score in baseline.scores} == {"loss_difference", "gradient_difference"}
    assert all(score.value < 1e-5 for score in baseline.scores)


@pytest.mark.usefixtures("without_compiler")
def test_several_shapes_are_measured_each(tmp_path: Path) -> None:
    shapes = {"batch=1": {"batch": 1}, "batch=3": {"batch": 3}}
    result = climb(
        f"{TINY}:convolutions",
        out=tmp_path,
        shapes=shapes,
        device="cpu",
        rungs=("fold_batchnorm",),
        sampling=0.2,
        timeout=60,
        progress=None,
    )
    for m in result.measurements:
        if m.samples:
            assert set(m.samples) == set(shapes) and set(m.setup_s) == set(shapes)


@pytest.mark.usefixtures("without_compiler")
def test_the_memory_objective_judges_by_bytes(tmp_path: Path) -> None:
    result = climb(
        f"{TINY}:convolutions",
        out=tmp_path,
        device="cpu",
        objective="memory",
        rungs=("fold_batchnorm",),
        sampling=0.2,
        progress=None,
    )
    trial = next(m for m in result.measurements if m.role == "trial")
    assert "MiB" in trial.reason or "KiB" in trial.reason


@pytest.mark.usefixtures("without_compiler")
def test_p99_keeps_no_plan_with_a_longer_tail(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "sampling": 1, "ablation": False, "progress": None}
    rungs = ("planted_fast", "planted_spiky")
    result = climb(f"{PLANTED}:ticks", out=tmp_path, objective="p99", rungs=rungs, **options)
    seen = verdicts(result)
    assert seen["planted_fast"][0] == "kept" and seen["planted_spiky"][0] == "dropped"
    assert str(result.plan) == "planted_fast" and result.plan.objective == "p99"
    assert all(len(m.samples[""]) >= 1000 and m.time_s() > 0 for m in result.measurements if m.samples)
    page = (tmp_path / "report.md").read_text()
    assert "99th percentile of a call" in page and "| Calls |" in page
    # By the median it is a good plan.
    assert str(climb(f"{PLANTED}:ticks", rungs=rungs[1:], **options).plan) == "planted_spiky"


@pytest.mark.usefixtures("without_compiler")
def test_requests_of_concurrent_callers_within_limits(tmp_path: Path) -> None:
    """The climb, its front and their files; the planted time of concurrent calls adds up, so rates are those of one."""
    result = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        objective="requests",
        callers=3,
        max_error=1e-6,
        rungs=("planted_fast", "planted_small", "planted_wrong"),
        sampling=1,
        ablation=False,
        progress=None,
    )
    assert str(result.plan) == "planted_fast + planted_small" and {m.callers for m in result.measurements} == {3}
    assert result.final.requests_per_s() == pytest.approx(250, rel=0.01)
    assert all(m.scores[0].limit == 1e-6 for m in result.measurements if m.scores)
    assert verdicts(result)["planted_wrong"][0] == "refused" and "≤ 1e-06" in verdicts(result)["planted_wrong"][1]
    (point,) = result.front
    (path,) = (tmp_path / "front").iterdir()
    assert path.name == "1-fastest-smallest-most-exact.toml" and path == result.files["front 1"]
    assert Plan.load(path) == result.plan and Plan.load(path).objective == "requests" and point.is_answer


@pytest.mark.usefixtures("without_compiler")
def test_no_plan_within_the_memory_limit_raises_and_leaves_no_plan(tmp_path: Path) -> None:
    (tmp_path / "front").mkdir()
    for old in ("plan.toml", "front/1-fastest.toml"):
        (tmp_path / old).write_text("schema = 1\n")  # of an earlier climb
    with pytest.raises(RedlineError, match=r"no plan is an answer; .* above --max-memory 1 KiB: .* raise --max-memory"):
        climb(
            f"{PLANTED}:ticks",
            out=tmp_path,
            device="cpu",
            max_memory="1KiB",
            rungs=("planted_fast",),
            sampling=0.2,
            ablation=False,
            progress=None,
        )
    assert {path.name for path in tmp_path.iterdir()} == {"front", "measurements.jsonl", "report.html", "report.md"}
    assert list((tmp_path / "front").iterdir()) == []
    assert "**No plan is an answer; the best one is above" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (f"{TINY}:deaf", "does not react"),
        (f"{TINY}:random", "fails its own gate"),
        (f"{TINY}:raises", "this model is broken"),
        ("no.such.module:f", "cannot import"),
        ("nothing", "no workload 'nothing'"),
    ],
)
def test_invalid_workloads_raise(workload: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        climb(workload, out=tmp_path, device="cpu", timeout=30, progress=None)


def test_bad_settings(tmp_path: Path) -> None:
    for values, sentence in (
        ({"objective": "beauty"}, "unknown objective"),
        ({"objective": "requests", "callers": 0}, "at least one caller"),
        ({"max_memory": 0}, "maximum memory must be above zero"),
        ({"max_error": -1.0}, "maximum error must be above zero"),
        ({"rungs": ("warp",)}, "unknown rung"),
        ({"reference": "fp8"}, "choose fp32 or fp64"),
        ({"rungs": ("tf32",), "without": ("tf32",)}, "both in the rungs to try and in those to leave out"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            climb("resnet", out=tmp_path, **values)


@pytest.mark.parametrize(
    ("role", "added", "ratio", "others", "kept"),
    [
        ("trial", "threads", (17.5, 0.7, 87.0), 2.0, True),
        ("trial", "threads", (17.5, 0.7, 87.0), 0.0, False),  # on a quiet machine only what is beyond the noise is kept
        ("trial", "threads", (1.05, 0.7, 1.5), 2.0, False),
        ("trial", "threads", (0.5, 0.1, 3.0), 2.0, False),
        ("trial", "onnxruntime", (17.5, 0.7, 87.0), 2.0, False),
        ("opening", "onnxruntime", (1.3, 0.8, 2.5), 2.0, True),
        ("opening", "onnxruntime", (1.3, 0.8, 2.5), 0.0, False),
        ("opening", "onnxruntime", (1.3, 0.3, 2.5), 2.0, False),  # the interval speaks more against it
        ("opening", "onnxruntime", (1.09, 0.95, 2.5), 2.0, False),
        ("ablation", "onnxruntime", (1.3, 0.8, 2.5), 2.0, True),
    ],
)
def test_what_is_probably_faster_is_kept_beside_other_load(
    role: str,
    added: str,
    ratio: tuple[float, float, float],
    others: float,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("redline.machine.load.cores", lambda: 2)
    trials = Trials.__new__(Trials)
    trials.load, trials.machine = Load(others), Machine.detect("cpu")
    trials.spec = TrialSpec("a workload", {"": {}}, "cpu", {})
    assert bool(trials._why_probable(role, Plan.parse(added), Interval(*ratio))) is kept
    trials.spec = replace(trials.spec, objective=Objective.MEMORY)
    assert not trials._why_probable(role, Plan.parse(added), Interval(*ratio))


@pytest.mark.usefixtures("without_compiler")
def test_an_opening_that_noise_hides_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turns of the opening are noisy, the next are not."""
    asked: list[str] = []
    turns = Trials.take_turns

    def noisy(self: Trials, arms: list[Arm], about: dict[str, Any]) -> list[dict[str, list[float]]]:
        taken = turns(self, arms, about)
        asked.append(" against ".join(str(arm.plan) for arm in reversed(arms)))
        if len(arms) == 2 and asked.count(asked[-1]) == 1:
            taken[1] = {"": [seconds * (0.7, 3.0)[i % 2] for i, seconds in enumerate(taken[1][""])]}
        return taken

    monkeypatch.setattr(Trials, "take_turns", noisy)
    monkeypatch.setattr("redline.ladder.search.climber.openings", lambda *_: [Plan.parse("planted_fast")])
    climbed = climb(f"{PLANTED}:ticks", device="cpu", rungs=["planted_fast"], sampling=1, progress=None)
    opening = next(row for row in climbed.measurements if row.role == "opening")
    assert asked.count("planted_fast against eager") == 2 and len(opening.samples[""]) > 20
    assert opening.verdict == "kept" and str(climbed.plan) == "planted_fast"
