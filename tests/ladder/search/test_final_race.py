"""The final race: its racers, its winner and its notes."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fake_arms import RED, fake_arm
from redline.errors import WorkloadError
from redline.ladder.measuring.trial import FRESH_SEEDS, TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.final_race import run_race
from redline.ladder.statistics import Interval

SPEC = TrialSpec("a workload", {"": {}}, "cpu", {}, sampling_s=0.01)


class Log:
    """Keeps rows as they are given."""

    def __init__(self, baseline_s: float = 0.0, peak_bytes: int = 0) -> None:
        samples = {"": [baseline_s] * 3} if baseline_s else {}
        self.rows = (
            [SimpleNamespace(role="baseline", plan="eager", verdict="baseline", samples=samples, peak_bytes=peak_bytes)]
            if baseline_s
            else []
        )

    def row(self, role: str, plan: Plan, verdict: str, reason: str, *seen: Any, notes: Any = (), **about: Any) -> Any:
        return SimpleNamespace(
            role=role, plan=str(plan), verdict=verdict, reason=reason, notes=notes, peak_bytes=0, samples={}, **about
        )

    def record(self, row: Any) -> Any:
        self.rows.append(row)
        return row


class ParallelSetups:
    def __init__(self, arms: dict[str, Any]) -> None:
        self.arms, self.opened = arms, []

    def open(self, plan: Plan, seeds: tuple[int, ...]) -> Any:
        self.opened.append(str(plan))
        found = self.arms[str(plan)]
        if isinstance(found, Exception):
            raise found
        return found


def race(
    times_s: dict[str, Any], plan: str, rivals: tuple[str, ...] = (), log: Any = None, **about: Any
) -> tuple[Any, Any, ParallelSetups]:
    """The rivals are alive; eager and the plan are set up."""
    arms = {
        name: fake_arm(name, value, pid=number) if isinstance(value, float) else value
        for number, (name, value) in enumerate(times_s.items(), 1)
    }
    log, setups = log or Log(), ParallelSetups(arms)
    alive = {Plan.parse(rival): arms[rival] for rival in rivals}
    for arm in alive.values():
        arm.peak_bytes = 1000  # measured before
    spec = replace(SPEC, references={FRESH_SEEDS: "fresh.pt"})
    won = run_race(setups, spec, log, Plan.parse(plan), alive, **about)
    assert all(arm.worker.stopped for arm in arms.values() if not isinstance(arm, Exception))
    return won, log, setups


def test_the_faster_plan_wins_and_is_written_last() -> None:
    won, log, setups = race({"eager": 0.02, "bf16": 0.01}, "bf16", ("eager", "bf16"))
    assert setups.opened == []  # both run already
    assert (won.plan, won.verdict) == ("bf16", "kept") and won.reason.endswith("over eager")
    assert [(row.plan, row.verdict) for row in log.rows] == [("eager", "baseline"), ("bf16", "kept")]
    assert won.against == "eager" and not hasattr(log.rows[0], "against")


def test_a_plan_that_is_not_better_leaves_the_model_as_it_is() -> None:
    won, log, _ = race({"eager": 0.01, "bf16": 0.01}, "bf16")
    assert won.plan == "eager" and won.reason == "nothing beat the model as it is" and log.rows[-1] is won


def test_a_plan_that_a_trial_has_verified_only_has_to_be_faster_again() -> None:
    """Beside other load, the interval of one race may include 1."""

    def noisy(plan: str, seconds: float, pid: int) -> Any:
        arm = fake_arm(plan, seconds, pid=pid)
        times = itertools.cycle((1.0, 1.5, 0.7, 2.0, 0.6) if pid == 2 else (1.0, 0.6, 2.0, 0.7, 1.5))
        arm.worker._seconds = lambda: {"": seconds * next(times)}
        return arm

    def won(*kept: str, low: float = 1.1) -> str:
        log = Log()
        about = {"role": "trial", "verdict": "kept", "samples": {}, "speedup": lambda: Interval(1.2, low, 1.3)}
        log.rows = [SimpleNamespace(plan=plan, peak_bytes=0, **about) for plan in kept]
        arms = {"eager": noisy("eager", 0.0104, 1), "bf16": noisy("bf16", 0.01, 2)}
        return race(arms, "bf16", log=log)[0].plan

    assert won("bf16") == "bf16" and won() == won("fp16") == "eager"
    # It was kept although it was only probably faster, or because it is smaller.
    assert won("bf16", low=0.9) == "eager"
    assert race({"eager": 0.01, "bf16": 0.011}, "bf16")[0].plan == "eager"


def test_a_better_rival_wins_unless_it_is_barred() -> None:
    times = {"eager": 0.03, "bf16": 0.02, "compile": 0.01}
    assert race(times, "bf16", ("compile",))[0].plan == "compile"
    assert race(times, "bf16", ("compile",), barred=("compile",))[0].plan == "bf16"
    assert race({"eager": 0.03, "compile": 0.01}, "eager", ("compile",), barred=["compile"])[0].plan == "eager"
    # The favourite is only beaten beyond the noise.
    assert race({"eager": 0.03, "bf16": 0.01, "compile": 0.01}, "bf16", ("compile",))[0].plan == "bf16"


def test_racer_that_fails_or_is_outside_its_gate_is_out() -> None:
    failure = WorkerFailed("oom", "no memory")
    won, log, _ = race({"eager": 0.02, "bf16": failure, "compile": 0.01}, "bf16", ("compile",))
    assert won.plan == "compile" and won.notes[0] == "bf16 could not run in the final race: no memory"
    won, log, _ = race({"eager": 0.02, "bf16": fake_arm("bf16", 0.001, score=RED)}, "bf16")
    assert won.plan == "eager" and log.rows[0].verdict == "refused" and "on fresh inputs" in log.rows[0].reason


@pytest.mark.parametrize(
    ("eager", "sentence"),
    [(WorkerFailed("oom", "no memory"), "did not run again"), (fake_arm("eager", score=RED), "fails its own gate")],
)
def test_without_eager_there_is_no_race(eager: Any, sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        race({"eager": eager, "bf16": 0.01}, "bf16")


def test_racers_run_again_without_one_that_dies() -> None:
    dying = fake_arm("compile", 0.001, pid=7)
    ask = dying.worker.ask
    dying.worker.ask = lambda request, *given, **about: _dies_in_samples(dying, ask, request, *given, **about)
    won, _, _ = race({"eager": 0.02, "bf16": 0.01, "compile": dying}, "bf16", ("compile",))
    assert won.plan == "bf16" and won.notes == ("compile left the final race: it was killed",)


def _dies_in_samples(arm: Any, ask: Any, request: str, *given: Any, **about: Any) -> Any:
    arm.worker.dies = request == "sample"
    return ask(request, *given, **about)


@pytest.mark.parametrize(("then_s", "noted"), [(0.0200, False), (0.0245, False), (0.0255, True), (0.0155, True)])
def test_note_if_the_speed_of_the_machine_drifted(then_s: float, noted: bool) -> None:
    won, _, _ = race({"eager": 0.02, "bf16": 0.01}, "bf16", log=Log(then_s))
    assert any("the machine's speed changed in between" in note for note in won.notes) is noted


def test_a_running_plan_that_fails_on_fresh_inputs_is_set_up_again() -> None:
    """A model that keeps state gives other outputs after many steps than a new one does."""
    stale = fake_arm("bf16", 0.01, pid=5)
    stale.worker.scores = (RED,)
    anew = fake_arm("bf16", 0.01, pid=6)
    setups: Any = ParallelSetups({"eager": fake_arm("eager", 0.02), "bf16": anew})
    spec = replace(SPEC, references={FRESH_SEEDS: "fresh.pt"})
    log: Any = Log()
    won = run_race(setups, spec, log, Plan.parse("bf16"), {Plan.parse("bf16"): stale})
    assert won.plan == "bf16" and setups.opened == ["eager", "bf16"]
    assert stale.worker.stopped and anew.worker.stopped


def with_peaks(**mib: int) -> dict[str, Any]:
    return {
        name: fake_arm(name, seconds, pid=number, peak_bytes=mib[name] * 2**20)
        for number, (name, seconds) in enumerate((("eager", 0.03), ("bf16", 0.02), ("compile", 0.01)), 1)
    }


def limited_race(mib: dict[str, int], limit_mib: int) -> tuple[Any, Any]:
    log: Any = Log()
    spec = replace(SPEC, references={FRESH_SEEDS: "fresh.pt"}, max_bytes=limit_mib * 2**20)
    arms = with_peaks(**mib)
    alive = {Plan.parse("compile"): arms["compile"]}
    arms["compile"].peak_bytes = mib["compile"] * 2**20
    setups: Any = ParallelSetups(arms)
    return run_race(setups, spec, log, Plan.parse("bf16"), alive), log


def test_a_plan_above_the_memory_limit_does_not_win() -> None:
    won, log = limited_race({"eager": 100, "bf16": 60, "compile": 150}, 120)
    assert (won.plan, won.verdict) == ("bf16", "kept")
    reasons = {row.plan: (row.verdict, row.reason) for row in log.rows}
    assert reasons["compile"] == ("dropped", "above --max-memory 120 MiB: its peak is 150 MiB")
    # Eager is above the limit, and a slower plan is within it.
    assert limited_race({"eager": 100, "bf16": 60, "compile": 150}, 80)[0].plan == "bf16"


def test_no_plan_within_the_memory_limit_is_no_answer() -> None:
    won, _ = limited_race({"eager": 100, "bf16": 60, "compile": 150}, 50)
    assert (won.plan, won.verdict) == ("bf16", "dropped")
    assert won.reason == "no plan is an answer; the best one is above --max-memory 50 MiB: its peak is 60 MiB"
