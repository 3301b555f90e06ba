"""The climb: every verdict is reached by a planted rung, nothing ends it, and nothing is lost.

The planted model keeps its own time, so that a verdict depends on the climb alone; `test_overhead` climbs in real time.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planted_rungs
from redline.errors import RedlineError, WorkloadError
from redline.ladder.measurement import load_measurements
from redline.ladder.measuring.trial import Arm, TrialSpec, take_turns
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.plan import Plan
from redline.ladder.search.climber import Climbed, Settings, _Climb, climb
from redline.ladder.search.parallel_setups import ParallelSetups
from redline.ladder.search.settings import ask_machine, prepare_trials
from redline.ladder.verify import verify
from redline.machine.machine import Machine

TINY = str(Path(__file__).parents[2] / "tiny_workloads.py")
PLANTED = str(Path(__file__).parents[2] / "planted_rungs.py")
# What a rung is kept for that only saves memory.
SMALLER = "as fast, and smaller"


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    planted_rungs.plant()
    yield
    planted_rungs.uproot()


@pytest.fixture(scope="module", autouse=True)
def no_ceilings() -> Iterator[None]:
    """They take seconds, and no verdict here asks for them; `cli/test_climb` climbs with them."""

    def ask(pool: WorkerPool, device: str, measure: bool = True) -> Machine:
        return ask_machine(pool, device, measure=False)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("redline.ladder.search.climber", "redline.ladder.verify"):
            patch.setattr(f"{module}.ask_machine", ask)
        yield


@pytest.fixture(autouse=True)
def lent_workers(monkeypatch: pytest.MonkeyPatch, lent_pool: WorkerPool) -> None:
    for module in ("redline.ladder.search.climber", "redline.ladder.verify"):
        monkeypatch.setattr(f"{module}.WorkerPool", lambda: contextlib.nullcontext(lent_pool))


@pytest.fixture(scope="module")
def climbed(
    tmp_path_factory: pytest.TempPathFactory, quiet_pool: WorkerPool, no_ceilings: None
) -> Iterator[tuple[Climbed, Path]]:
    planted_rungs.plant()
    folder = tmp_path_factory.mktemp("climb")
    names = (*(rung.name for rung in planted_rungs.PLANTED), "cuda_graph")
    settings = Settings(f"{PLANTED}:ticks", folder, device="cpu", only=names, timeout_s=8, sampling_s=2)
    yield _Climb(settings, quiet_pool, lambda text, row: None).run(), folder


def verdicts(climbed: Climbed, role: str = "trial") -> dict[str, tuple[str, str]]:
    return {m.rung: (m.verdict, m.reason) for m in climbed.measurements if m.role == role}


def test_every_planted_rung_gets_its_verdict(climbed: tuple[Climbed, Path]) -> None:
    seen = verdicts(climbed[0])
    assert seen["planted_fast"][0] == "kept"
    # Planted time has noise of 0.1%, of which even a tenth may be told apart from none.
    assert seen["planted_useless"][0] == "dropped"
    assert re.search(r"(noise|slower): 1\.00×", seen["planted_useless"][1]), seen["planted_useless"]
    assert seen["planted_slow"][0] == "dropped" and "slower" in seen["planted_slow"][1]
    assert seen["planted_small"][0] == "kept" and seen["planted_small"][1].startswith(SMALLER)
    assert seen["planted_wrong"][0] == "refused" and "outside the gate" in seen["planted_wrong"][1]
    assert seen["planted_nan"][0] == "refused" and "nan" in seen["planted_nan"][1]
    assert seen["planted_empty"][0] == "refused" and "no proof" in seen["planted_empty"][1]
    assert seen["planted_crash"][0] == "failed" and "SIGKILL" in seen["planted_crash"][1]
    assert seen["planted_hang"][0] == "failed" and "no result within" in seen["planted_hang"][1]
    assert seen["planted_raises"][0] == "failed" and "this rung is broken" in seen["planted_raises"][1]
    assert seen["planted_fixed"][0] == "kept"
    assert seen["cuda_graph"] == ("unavailable", "it needs a CUDA GPU")


@pytest.mark.usefixtures("without_compiler")
def test_set_ups_side_by_side_change_no_verdict(
    climbed: tuple[Climbed, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(ParallelSetups, "at_once", lambda self, peak_bytes: 4)
    names = ("planted_fast", "planted_slow", "planted_wrong", "planted_crash", "planted_raises")
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=names, timeout_s=90, sampling_s=1)
    found = climb(settings, lambda text, row: heard.append(text))
    assert "setting up 4 plans side by side" in heard
    alone, side_by_side = verdicts(climbed[0]), verdicts(found)
    assert {rung: side_by_side[rung][0] for rung in names} == {rung: alone[rung][0] for rung in names}
    assert str(found.plan) == "planted_fast"


@pytest.mark.usefixtures("without_compiler")
def test_what_was_worth_nothing_is_asked_again_as_soon_as_a_compiler_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.ladder.search.search_order.FIRST", ("planted_later", "planted_engine"))
    only = ("planted_later", "planted_engine", "planted_slow")
    events: list[str] = []
    set_up = ParallelSetups.open

    def recorded(self: ParallelSetups, plan: Plan, *given: Any, **about: Any) -> Arm:
        events.append(str(plan))
        return set_up(self, plan, *given, **about)

    monkeypatch.setattr(ParallelSetups, "open", recorded)
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=only, timeout_s=90, sampling_s=1)
    result = climb(settings, lambda text, row: events.append(text))
    told = [(m.role, m.rung, m.verdict) for m in result.measurements if m.role in ("trial", "second look")]
    assert told == [
        ("trial", "planted_later", "dropped"),
        ("trial", "planted_engine", "kept"),
        ("second look", "planted_later", "kept"),
        ("trial", "planted_slow", "dropped"),
    ]
    assert str(result.plan) == "planted_later + planted_engine"
    # A plan that is kept goes on running in its process, also beside a candidate that is dropped.
    opened = events[: events.index("the final race")]
    assert opened.count("eager") == 1 and opened.count(str(result.plan)) == 1


@pytest.mark.usefixtures("without_compiler")
def test_a_plan_that_dies_while_it_is_timed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the kept plan in a trial, and once the second baseline in the final race."""
    died: list[str] = []

    def dying(module: str, victim: int) -> None:
        def take(arms: list[Arm], spec: TrialSpec, **about: float) -> object:
            if len(arms) > 1 and module not in died:
                died.append(module)
                os.kill(arms[victim].worker.pid, signal.SIGKILL)
            return take_turns(arms, spec, **about)

        monkeypatch.setattr(f"{module}.take_turns", take)

    dying("redline.ladder.search.climber", 0)
    dying("redline.ladder.search.final_race", -1)
    only = ("planted_slow", "planted_fast")
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=only, sampling_s=1, ablate=False)
    result = climb(settings)
    assert died == ["redline.ladder.search.climber", "redline.ladder.search.final_race"]
    assert {rung: verdict for rung, (verdict, _) in verdicts(result).items()} == {
        "planted_fast": "kept",
        "planted_slow": "dropped",
    }
    assert str(result.plan) == "eager" and any("left the final race" in note for note in result.final.notes)


@pytest.mark.usefixtures("without_compiler")
def test_a_budget_that_ends_in_a_trial_is_not_the_rungs_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small share of a long budget: it is soon over, and a slow machine still gets as far as the trial.
    monkeypatch.setattr("redline.ladder.search.budget._SHARE", 0.05)
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 0.5)
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=("planted_hang",), budget_s=20, sampling_s=1)
    verdict, reason = verdicts(climb(settings))["planted_hang"]
    assert verdict == "unmeasured" and "for want of budget" in reason


@pytest.mark.usefixtures("without_compiler")
def test_a_search_that_did_not_end_is_not_begun_again_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.ladder.search.budget._WORTH_ANOTHER_SEARCH", 1.0)
    # A small share is soon over; on a slow machine both would be given the least.
    monkeypatch.setattr("redline.ladder.search.budget._SHARE_OF_A_SEARCH", 0.03)
    monkeypatch.setattr("redline.ladder.search.budget._LEAST_S", 0.5)
    only = ("planted_search(mode=max-autotune)", "planted_search(mode=max-autotune, wide=true)")
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=only, budget_s=40, sampling_s=1)
    (_, first), (verdict, second) = verdicts(climb(settings)).values()
    assert "for want of budget" in first
    assert verdict == "unmeasured" and re.fullmatch(
        r"a search over kernels did not end within [\d.]+ s before, and now has less", second
    )


def test_no_speed_on_a_red_gate(climbed: tuple[Climbed, Path]) -> None:
    assert all(not m.samples for m in climbed[0].measurements if m.verdict in ("refused", "failed"))


def test_ablation_drops_what_a_later_rung_made_useless(climbed: tuple[Climbed, Path]) -> None:
    seen = verdicts(climbed[0], "ablation")
    assert seen["planted_fast"][0] == "dropped" and seen["planted_fixed"][0] == "kept"
    assert seen["planted_small"][0] == "kept" and SMALLER in seen["planted_small"][1]
    assert str(climbed[0].plan) == "planted_small + planted_fixed"


def test_the_final_race_and_the_second_baseline_are_in_every_table(climbed: tuple[Climbed, Path]) -> None:
    rows = climbed[0].measurements
    assert [m.plan for m in rows if m.role == "baseline"] == ["eager"]
    assert any(m.role == "compile" for m in rows)
    final = [m for m in rows if m.role == "final" and m.verdict == "kept"]
    assert len(final) == 1 and final[0].plan == "planted_small + planted_fixed" and final[0].passed
    speedup = final[0].speedup()
    assert speedup is not None and 3.99 < speedup.middle < 4.01


def test_every_measurement_is_on_disk(climbed: tuple[Climbed, Path]) -> None:
    saved = load_measurements(climbed[1] / "measurements.jsonl")
    assert [m.to_json() for m in saved] == [m.to_json() for m in climbed[0].measurements]


@pytest.mark.usefixtures("without_compiler")
def test_resume_measures_nothing_twice_and_loses_nothing(climbed: tuple[Climbed, Path], tmp_path: Path) -> None:
    lines = (climbed[1] / "measurements.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "measurements.jsonl").write_text("".join(lines[:6]))
    names = (*(rung.name for rung in planted_rungs.PLANTED if rung.name != "planted_hang"), "cuda_graph")
    settings = Settings(
        f"{PLANTED}:ticks",
        tmp_path,
        device="cpu",
        only=names,
        timeout_s=20,
        sampling_s=1,
        resume=True,
        ablate=False,
    )
    resumed = climb(settings)
    after = (tmp_path / "measurements.jsonl").read_text().splitlines(keepends=True)
    assert after[:6] == lines[:6]
    assert len({(m.role, m.rung, m.against, m.plan) for m in resumed.measurements}) == len(resumed.measurements)
    assert len(after) == len(resumed.measurements)
    assert str(resumed.plan) == "planted_fast + planted_small + planted_fixed"


@pytest.mark.usefixtures("without_compiler")
def test_resuming_a_finished_climb_races_again_and_leaves_one_final_race(
    climbed: tuple[Climbed, Path], tmp_path: Path
) -> None:
    (tmp_path / "measurements.jsonl").write_text((climbed[1] / "measurements.jsonl").read_text())
    # What failed is tried again, so the rungs that crash and hang are left out here.
    broken = ("planted_crash", "planted_hang", "planted_raises")
    names = (*(rung.name for rung in planted_rungs.PLANTED if rung.name not in broken), "cuda_graph")
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", only=names, sampling_s=1, resume=True)
    resumed = climb(settings)
    saved = load_measurements(tmp_path / "measurements.jsonl")
    assert [m.to_json() for m in saved] == [m.to_json() for m in resumed.measurements]
    assert len([m for m in saved if m.role == "final" and m.verdict == "kept"]) == 1
    assert resumed.plan == climbed[0].plan


@pytest.mark.usefixtures("without_compiler")
def test_another_model_under_the_same_address_is_not_resumed(climbed: tuple[Climbed, Path], tmp_path: Path) -> None:
    changed = tmp_path / "planted_rungs.py"
    changed.write_text(Path(PLANTED).read_text() + "# another version\n")
    rows = (climbed[1] / "measurements.jsonl").read_text().replace(PLANTED, str(changed))
    (tmp_path / "measurements.jsonl").write_text(rows)
    settings = Settings(
        f"{changed}:ticks", tmp_path, device="cpu", only=("planted_fast",), sampling_s=1, resume=True, budget_s=60
    )
    resumed = climb(settings)
    assert "because planted_rungs.py has changed" in resumed.resumed
    old = {row.created for row in climbed[0].measurements}
    assert not any(row.created in old for row in resumed.measurements)


def test_a_plan_that_is_not_better_than_eager_does_not_win(tmp_path: Path, quiet_pool: WorkerPool) -> None:
    from redline.ladder.search.final_race import run_race
    from redline.ladder.search.run_log import RunLog

    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", sampling_s=1)
    machine = ask_machine(quiet_pool, "cpu", measure=False)
    spec, facts = prepare_trials(quiet_pool, settings, machine)
    log = RunLog(spec, machine, facts)
    setups = ParallelSetups(quiet_pool, spec, machine)
    assert run_race(setups, spec, log, Plan.parse("planted_useless"), []).plan == "eager"
    final = run_race(setups, spec, log, Plan.parse("planted_fast"), [])
    assert final.plan == "planted_fast" and not final.notes
    # The start was on a machine of another mood.
    quick = {label: [0.3 * s for s in samples] for label, samples in log.rows[0].samples.items()}
    log.rows.insert(0, replace(log.rows[0], role="baseline", samples=quick))
    (note,) = run_race(setups, spec, log, Plan.parse("planted_fast"), []).notes
    assert "trust ratios taken in turns" in note


def test_what_the_user_left_out_cannot_win(tmp_path: Path, pool: WorkerPool) -> None:
    """torch.compile is raced as the second baseline, and would win against an empty plan."""
    settings = Settings(f"{PLANTED}:ticks", tmp_path, device="cpu", without=("compile",), only=("tf32",), sampling_s=1)
    result = climb(settings)
    assert str(result.plan) == "eager"
    speedup = next(m.speedup() for m in result.measurements if m.role == "final" and m.plan == "compile")
    assert speedup is not None and speedup.above(1.5)
    # What the compiler was asked about this CPU was laid out for it, and it took that.
    programs = [
        {path.name for path in folder.rglob("*.cpp") if "_chk_kernel" in path.read_text()}
        for folder in (pool.scratch / "inductor", *Path(os.environ["REDLINE_CACHE"]).glob("vector-isa-*"))
    ]
    assert len(programs) == 2 and programs[0] == programs[1] != set()


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("with_the_other", [True, False])
def test_a_refused_rung_gets_its_way_out_unless_that_was_left_out(with_the_other: bool, tmp_path: Path) -> None:
    settings = Settings(
        f"{PLANTED}:ticks",
        tmp_path,
        device="cpu",
        only=("planted_hasty", "planted_careful") if with_the_other else ("planted_hasty",),
        sampling_s=1,
        ablate=False,
    )
    result = climb(settings)
    seen = verdicts(result)
    assert seen["planted_hasty"][0] == "refused"
    if with_the_other:
        assert seen["planted_hasty + planted_careful"][0] == "kept"
        assert str(result.plan) == "planted_hasty + planted_careful"
    else:
        assert list(seen) == ["planted_hasty"] and str(result.plan) == "eager"


@pytest.mark.usefixtures("without_compiler")
def test_a_target_stops_the_climb(tmp_path: Path) -> None:
    settings = Settings(
        f"{PLANTED}:ticks",
        tmp_path,
        device="cpu",
        only=("planted_fast", "planted_fixed"),
        target_s=0.005,
        sampling_s=1,
        ablate=False,
    )
    result = climb(settings)
    assert str(result.plan) == "planted_fast"
    assert verdicts(result)["planted_fixed"] == ("unmeasured", "the target was reached")
    assert result.target.startswith("5 ms was reached: ") and not result.missed_target
    assert result.plan.objective == "latency"


@pytest.mark.usefixtures("without_compiler")
def test_a_spent_budget_is_a_row_and_still_ends_in_a_plan(tmp_path: Path) -> None:
    """The references alone take longer than this budget: a rung that would be kept is not tried."""
    settings = Settings(
        f"{PLANTED}:ticks", tmp_path, device="cpu", only=("planted_fixed",), budget_s=0.05, sampling_s=1
    )
    result = climb(settings)
    assert verdicts(result) == {"planted_fixed": ("unmeasured", "the budget was spent")}
    assert [(m.role, m.plan) for m in result.measurements if m.samples] == [("baseline", "eager"), ("final", "eager")]
    assert str(result.plan) == "eager" and result.final.verdict == "kept"


@pytest.mark.usefixtures("without_compiler")
def test_training_is_gated_on_loss_and_gradients(tmp_path: Path) -> None:
    settings = Settings(
        f"{TINY}:training", tmp_path, device="cpu", only=("fused_optimizer",), sampling_s=0.2, timeout_s=60
    )
    result = climb(settings)
    baseline = result.measurements[0]
    assert {score.metric for score in baseline.scores} == {"loss_difference", "gradient_difference"}
    assert all(score.value < 1e-5 for score in baseline.scores)


@pytest.mark.usefixtures("without_compiler")
def test_several_shapes_are_measured_each(tmp_path: Path) -> None:
    shapes = {"batch=1": {"batch": 1}, "batch=3": {"batch": 3}}
    settings = Settings(
        f"{TINY}:convolutions",
        tmp_path,
        shapes,
        device="cpu",
        only=("fold_batchnorm",),
        sampling_s=0.2,
        timeout_s=60,
    )
    result = climb(settings)
    for m in result.measurements:
        if m.samples:
            assert set(m.samples) == set(shapes) and set(m.setup_s) == set(shapes)


@pytest.mark.usefixtures("without_compiler")
def test_the_memory_objective_judges_by_bytes(tmp_path: Path) -> None:
    settings = Settings(
        f"{TINY}:convolutions",
        tmp_path,
        device="cpu",
        objective="memory",
        only=("fold_batchnorm",),
        sampling_s=0.2,
    )
    result = climb(settings)
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
def test_what_cannot_be_climbed(workload: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        climb(Settings(workload, tmp_path, device="cpu", timeout_s=30))


def test_bad_settings(tmp_path: Path) -> None:
    for values, sentence in (
        ({"objective": "beauty"}, "unknown objective"),
        ({"only": ("warp",)}, "unknown rung"),
        ({"reference": "fp8"}, "fp32 or fp64"),
        ({"only": ("tf32",), "without": ("tf32",)}, "both to be tried and to be left out"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            Settings("resnet", tmp_path, **values)


@pytest.mark.usefixtures("without_compiler")
def test_verify_names_the_rungs_that_no_longer_hold() -> None:
    settings = Settings(f"{PLANTED}:ticks", Path("."), device="cpu", timeout_s=30, sampling_s=1)
    seen = verify(Plan.parse("planted_fast + planted_useless"), settings)
    assert not seen.holds and "planted_useless" in seen.reason
    assert [(r.rung, r.holds) for r in seen.rungs] == [("planted_fast", True), ("planted_useless", False)]
    assert seen.speedup is not None and seen.speedup.above(1.5)
    good = verify(Plan.parse("planted_fast"), settings)
    assert good.holds
    red = verify(Plan.parse("planted_fast + planted_wrong"), settings)
    assert not red.holds and "outside the gate" in red.reason
    assert {r.rung: r.holds for r in red.rungs}["planted_wrong"] is False
    gone = verify(Plan.parse("tf32"), settings)
    assert not gone.holds and "cannot run here" in gone.reason


@pytest.mark.usefixtures("without_compiler")
def test_a_plan_that_dies_in_its_verification_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(arms: list[Arm], spec: TrialSpec, **about: float) -> object:
        os.kill(arms[-1].worker.pid, signal.SIGKILL)
        return take_turns(arms, spec, **about)

    monkeypatch.setattr("redline.ladder.verify.take_turns", take)
    settings = Settings(f"{PLANTED}:ticks", Path("."), device="cpu", timeout_s=30, sampling_s=1)
    seen = verify(Plan.parse("planted_fast"), settings)
    assert not seen.holds and seen.reason.startswith("the plan does not go on running: ") and seen.speedup is None
