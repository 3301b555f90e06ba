"""Budgets, targets, objectives, shapes, and what a climb refuses."""

import re
from pathlib import Path

import pytest

from redline.errors import RedlineError, WorkloadError
from redline.ladder.search.climb import climb
from redline.ladder.search.climbed import Climbed

pytestmark = pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers")
TINY = str(Path(__file__).parents[2] / "tiny_workloads.py")
PLANTED = str(Path(__file__).parents[2] / "planted_rungs.py")


def verdicts(climbed: Climbed, role: str = "trial") -> dict[str, tuple[str, str]]:
    return {m.rung: (m.verdict, m.reason) for m in climbed.measurements if m.role == role}


@pytest.mark.usefixtures("without_compiler")
def test_trial_stopped_by_the_budget_is_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small share of a long budget: it is soon over, and a slow machine still gets as far as the trial.
    monkeypatch.setattr("redline.ladder.search.budget._SHARE", 0.05)
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 0.5)
    verdict, reason = verdicts(
        climb(
            f"{PLANTED}:ticks",
            out=tmp_path,
            device="cpu",
            rungs=("planted_hang",),
            budget=20,
            sampling=1,
            progress=None,
        )
    )["planted_hang"]
    assert verdict == "unmeasured" and "to stay within the budget" in reason


@pytest.mark.usefixtures("without_compiler")
def test_unfinished_kernel_search_is_not_repeated_with_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.ladder.search.budget._WORTH_ANOTHER_SEARCH", 1.0)
    # A small share is soon over; on a slow machine both would be given the least.
    monkeypatch.setattr("redline.ladder.search.budget._SHARE_OF_A_SEARCH", 0.03)
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 0.5)
    only = ("planted_search(mode=max-autotune)", "planted_search(mode=max-autotune, wide=true)")
    (_, first), (verdict, second) = verdicts(
        climb(f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=only, budget=40, sampling=1, progress=None)
    ).values()
    assert "to stay within the budget" in first
    assert verdict == "unmeasured" and re.fullmatch(
        r"an earlier search for kernels did not end within [\d.]+ s, and less is left", second
    )


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
        ({"rungs": ("warp",)}, "unknown rung"),
        ({"reference": "fp8"}, "choose fp32 or fp64"),
        ({"rungs": ("tf32",), "without": ("tf32",)}, "both in the rungs to try and in those to leave out"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            climb("resnet", out=tmp_path, **values)
