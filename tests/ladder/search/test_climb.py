"""The climb: a planted rung for every verdict, failures that do not end it, and resuming.

The planted model keeps its own time, so that a verdict depends on the climb alone; `test_overhead` climbs in real time.
"""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planted_rungs
from redline.ladder.measurement import load_measurements
from redline.ladder.measuring.trial import Arm, TrialSpec, take_turns
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.plan import Plan
from redline.ladder.search.climb import climb
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.climber import Climber
from redline.ladder.search.parallel_setups import ParallelSetups
from redline.ladder.search.preparation import ask_machine, prepare_trials
from redline.ladder.search.progress import no_progress
from redline.ladder.search.search_order import EXPECTED_GAIN
from redline.ladder.search.settings import Settings, read_rungs

pytestmark = pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers")
TINY = str(Path(__file__).parents[2] / "tiny_workloads.py")
PLANTED = str(Path(__file__).parents[2] / "planted_rungs.py")
# What a rung is kept for that only saves memory.
SMALLER = "equally fast, and smaller"


@pytest.fixture(scope="module")
def climbed(
    tmp_path_factory: pytest.TempPathFactory, quiet_pool: WorkerPool, no_ceilings: None
) -> Iterator[tuple[Climbed, Path]]:
    planted_rungs.plant()
    folder = tmp_path_factory.mktemp("climb")
    names = (*(rung.name for rung in planted_rungs.PLANTED), "cuda_graph")
    settings = Settings(f"{PLANTED}:ticks", folder, device="cpu", only=read_rungs(names), timeout_s=8, sampling_s=2)
    yield Climber(settings, quiet_pool, no_progress).run(), folder


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
    monkeypatch.setattr(ParallelSetups, "at_once", lambda self, *_: 4)
    names = ("planted_fast", "planted_slow", "planted_wrong", "planted_crash", "planted_raises")
    found = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=names,
        timeout=90,
        sampling=1,
        progress=lambda text, row: heard.append(text),
    )
    assert "setting up 4 plans in parallel" in heard
    alone, side_by_side = verdicts(climbed[0]), verdicts(found)
    assert {rung: side_by_side[rung][0] for rung in names} == {rung: alone[rung][0] for rung in names}
    assert str(found.plan) == "planted_fast"


@pytest.mark.usefixtures("without_compiler")
def test_second_look_follows_a_kept_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPECTED_GAIN, "planted_later", 3.0)
    monkeypatch.setitem(EXPECTED_GAIN, "planted_engine", 2.0)
    only = ("planted_later", "planted_engine", "planted_slow")
    events: list[str] = []
    set_up = ParallelSetups.open

    def recorded(self: ParallelSetups, plan: Plan, *given: Any, **about: Any) -> Arm:
        events.append(str(plan))
        return set_up(self, plan, *given, **about)

    monkeypatch.setattr(ParallelSetups, "open", recorded)
    result = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=only,
        timeout=90,
        sampling=1,
        progress=lambda text, row: events.append(text),
    )
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
def test_climb_continues_after_a_process_dies_while_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the kept plan in a trial, and once the second baseline in the final race."""
    died: list[str] = []

    def dying(module: str, victim: int) -> None:
        def take(arms: list[Arm], spec: TrialSpec, sampling_s: float = 0) -> object:
            if len(arms) > 1 and module not in died:
                died.append(module)
                os.kill(arms[victim].worker.pid, signal.SIGKILL)
            return take_turns(arms, spec, sampling_s)

        monkeypatch.setattr(f"{module}.take_turns", take)

    dying("redline.ladder.search.trials", 0)
    dying("redline.ladder.search.final_race", -1)
    only = ("planted_slow", "planted_fast")
    result = climb(
        f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=only, sampling=1, ablation=False, progress=None
    )
    assert died == ["redline.ladder.search.trials", "redline.ladder.search.final_race"]
    assert {rung: verdict for rung, (verdict, _) in verdicts(result).items()} == {
        "planted_fast": "kept",
        "planted_slow": "dropped",
    }
    assert str(result.plan) == "eager" and any("left the final race" in note for note in result.final.notes)


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
    resumed = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=names,
        timeout=20,
        sampling=1,
        resume=True,
        ablation=False,
        progress=None,
    )
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
    resumed = climb(f"{PLANTED}:ticks", out=tmp_path, device="cpu", rungs=names, sampling=1, resume=True, progress=None)
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
    resumed = climb(
        f"{changed}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=("planted_fast",),
        sampling=1,
        resume=True,
        budget=60,
        progress=None,
    )
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
    assert run_race(setups, spec, log, Plan.parse("planted_useless"), {}).plan == "eager"
    final = run_race(setups, spec, log, Plan.parse("planted_fast"), {})
    assert final.plan == "planted_fast" and not final.notes
    # The start was on a machine of another mood.
    quick = {label: [0.3 * s for s in samples] for label, samples in log.rows[0].samples.items()}
    log.rows.insert(0, replace(log.rows[0], role="baseline", samples=quick))
    (note,) = run_race(setups, spec, log, Plan.parse("planted_fast"), {}).notes
    assert "compare speed-ups" in note


def test_baseline_with_an_excluded_rung_cannot_win(tmp_path: Path, pool: WorkerPool) -> None:
    """torch.compile is raced as the second baseline, and would win against an empty plan."""
    before = headers(pool.scratch)
    result = climb(
        f"{PLANTED}:ticks", out=tmp_path, device="cpu", without=("compile",), rungs=("tf32",), sampling=1, progress=None
    )
    assert str(result.plan) == "eager"
    speedup = next(m.speedup() for m in result.measurements if m.role == "final" and m.plan == "compile")
    assert speedup is not None and speedup.above(1.5)
    # The compiler used the header that was prepared for it, and built no other.
    used, known = headers(pool.scratch), headers(Path(os.environ["REDLINE_CACHE"]) / "compiled" / "prepared")
    assert known and known.items() <= used.items()
    assert used.keys() - before.keys() <= known.keys()


def headers(folder: Path) -> dict[str, int]:
    """Returns the precompiled headers, each with the time of its last change, which a copy or a link keeps."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.gch")}


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("with_the_other", [True, False])
def test_refused_rung_is_followed_by_its_alternative_unless_excluded(with_the_other: bool, tmp_path: Path) -> None:
    result = climb(
        f"{PLANTED}:ticks",
        out=tmp_path,
        device="cpu",
        rungs=("planted_hasty", "planted_careful") if with_the_other else ("planted_hasty",),
        sampling=1,
        ablation=False,
        progress=None,
    )
    seen = verdicts(result)
    assert seen["planted_hasty"][0] == "refused"
    if with_the_other:
        assert seen["planted_hasty + planted_careful"][0] == "kept"
        assert str(result.plan) == "planted_hasty + planted_careful"
    else:
        assert list(seen) == ["planted_hasty"] and str(result.plan) == "eager"
