"""The climb: baseline, then one rung at a time on top of what is kept, then a second look, an ablation and a final race.

Every measurement is written to disk as it is made; a climb that is killed goes on with `resume`.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redline.errors import RedlineError, WorkloadError
from redline.machine import Ceilings, Machine
from redline.measurement import Measurement, append, load_measurements
from redline.plan import Plan, parse_rung
from redline.quantities import format_bytes, format_seconds
from redline.rung import Rung, Stage
from redline.rungs import RUNGS, find_rung
from redline.statistics import Interval
from redline.trial import (
    FRESH_SEEDS,
    JUDGE_SEEDS,
    WORTHWHILE,
    Arm,
    Course,
    close,
    compare,
    geometric_mean_s,
    measure_peak,
    open_arm,
    take_turns,
)
from redline.version import VERSION
from redline.workers import WorkerFailed, WorkerPool

OBJECTIVES = ("latency", "throughput", "memory")
_COMPILE_MODES = {"cuda": ("default", "reduce-overhead", "max-autotune"), "cpu": ("default",)}
# A memory saving below this is allocator noise.
_SMALLER = 0.98


@dataclass(frozen=True)
class Settings:
    """What a climb is asked to do."""

    workload: str
    folder: Path
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    device: str = "auto"
    objective: str = "latency"
    target_s: float | None = None
    target_bytes: int | None = None
    budget_s: float | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    reference: str = "fp32"
    timeout_s: float = 300.0
    sampling_s: float = 6.0
    ablate: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise RedlineError(f"unknown objective {self.objective!r}: choose {', '.join(OBJECTIVES)}.")
        if self.reference not in ("fp32", "fp64"):
            raise RedlineError(f"the reference is fp32 or fp64, not {self.reference!r}.")
        for text in (*self.only, *self.without):
            parse_rung(text)

    @property
    def measurements_path(self) -> Path:
        return self.folder / "measurements.jsonl"


@dataclass(frozen=True)
class Climbed:
    """What came out."""

    plan: Plan
    measurements: tuple[Measurement, ...]
    machine: Machine


Listener = Callable[[str, Measurement | None], None]


def climb(settings: Settings, listen: Listener = lambda _text, _row: None) -> Climbed:
    """Climbs; `listen` hears what happens (a line of text, and a measurement when one was made)."""
    with WorkerPool() as pool:
        return _Climb(settings, pool, listen).run()


def ask_machine(pool: WorkerPool, device: str = "auto", measure: bool = True, again: bool = False) -> Machine:
    """The machine, read in a worker so that this process never starts CUDA."""
    worker = pool.start()
    try:
        seen = worker.ask("machine", 300, device=device, measure=measure, again=again)
    except WorkerFailed as failure:
        raise RedlineError(f"{failure}.") from failure
    finally:
        worker.stop()
    return machine_from_dict(seen)


def machine_from_dict(data: Mapping[str, Any]) -> Machine:
    values = {key: value for key, value in data.items() if key != "fingerprint"}
    for key in ("features", "hardware_dtypes", "attention_kernels", "capability"):
        values[key] = tuple(values[key])
    if values["ceilings"] is not None:
        values["ceilings"] = Ceilings(**values["ceilings"])
    return Machine(**values)


def make_references(pool: WorkerPool, settings: Settings, device: str) -> tuple[dict[tuple[int, ...], str], dict[str, Any]]:
    """Runs the untouched model on every judging seed; gives the files and what is known of the workload."""
    references, facts = {}, {}
    for seeds in (JUDGE_SEEDS, FRESH_SEEDS):
        path = str(pool.scratch / f"reference-{seeds[0]}.pt")
        worker = pool.start()
        try:
            facts = worker.ask(
                "reference",
                settings.timeout_s,
                address=settings.workload,
                shapes=settings.shapes,
                device=device,
                seeds=seeds,
                path=path,
                dtype=settings.reference,
            )
        except WorkerFailed as failure:
            prefix = "" if failure.kind == "workload" else f"{settings.workload}: the untouched model failed: "
            raise WorkloadError(f"{prefix}{failure}.") from failure
        finally:
            worker.stop()
        references[seeds] = path
    return references, facts


class _Climb:
    def __init__(self, settings: Settings, pool: WorkerPool, listen: Listener) -> None:
        self.settings = settings
        self.pool = pool
        self.listen = listen
        self.started = time.monotonic()
        self.rows: list[Measurement] = []
        self.plan = Plan()
        self._arm: Arm | None = None
        self.known: dict[tuple[str, str, str, str], Measurement] = {}

    def run(self) -> Climbed:
        self.listen("reading the machine", None)
        self.machine = ask_machine(self.pool, self.settings.device)
        self.listen("running the untouched model for reference", None)
        references, self.facts = make_references(self.pool, self.settings, self.machine.device)
        self.course = Course(
            self.settings.workload,
            self.settings.shapes,
            self.machine.device,
            references,
            self.settings.objective,
            self.settings.timeout_s,
            self.settings.sampling_s,
        )
        self._remember()
        try:
            self._baseline()
            self._compile_baselines()
            for rung in self._candidates():
                self._step("trial", rung)
            self._second_look()
            if self.settings.ablate:
                self._ablate()
            self._final()
        finally:
            close(self._arm)
        return Climbed(self.plan, tuple(self.rows), self.machine)

    # What is already known

    def _remember(self) -> None:
        """With `resume`, measurements of the same climb on the same machine are not made again."""
        path = self.settings.measurements_path
        self.run_id = uuid.uuid4().hex[:12]
        if not path.exists():
            return
        if not self.settings.resume:
            path.rename(path.with_name(f"measurements-{int(path.stat().st_mtime)}.jsonl"))
            return
        for row in load_measurements(path):
            same_machine = row.machine.get("fingerprint") == self.machine.fingerprint
            if same_machine and row.workload == self.settings.workload and row.objective == self.settings.objective:
                if set(row.shapes) <= set(self.settings.shapes) and row.verdict != "unmeasured":
                    self.known[(row.role, row.rung, row.against, "")] = row
                    self.run_id = row.run

    def _record(self, row: Measurement, text: str = "") -> Measurement:
        fresh = (row.role, row.rung, row.against, "") not in self.known
        self.rows.append(row)
        if fresh:
            append(self.settings.measurements_path, row)
        self.listen(text or f"{row.rung or row.plan}: {row.verdict}", row)
        return row

    # Time

    def _left_s(self) -> float:
        if self.settings.budget_s is None:
            return float("inf")
        return self.settings.budget_s - (time.monotonic() - self.started)

    def _spent(self) -> bool:
        """A fifth of the budget, a minute at most, is kept for the final race."""
        return self._left_s() < min(60.0, 0.2 * (self.settings.budget_s or 0.0))

    def _timeout_s(self) -> float:
        return max(5.0, min(self.settings.timeout_s, self._left_s()))

    def _target_reached(self, row: Measurement) -> bool:
        if self.settings.target_s is not None and row.samples:
            return all(row.interval_s(shape).high <= self.settings.target_s for shape in row.shapes)
        return self.settings.target_bytes is not None and 0 < row.peak_bytes <= self.settings.target_bytes

    # Rows

    def _row(self, role: str, plan: Plan, verdict: str, reason: str, **values: Any) -> Measurement:
        return Measurement(
            workload=self.settings.workload,
            plan=str(plan),
            role=role,
            verdict=verdict,
            reason=reason,
            machine=self.machine.as_dict(),
            flops=self.facts["flops"],
            items=self.facts["items"],
            unit=self.facts["unit"],
            training=self.facts["training"],
            objective=self.settings.objective,
            options={label: dict(options) for label, options in self.settings.shapes.items()},
            run=self.run_id,
            command=" ".join(["redline", *sys.argv[1:]]) if sys.argv[:1] else "",
            redline=VERSION,
            **values,
        )

    def _seen(self, arm: Arm, samples: Mapping[str, list[float]] | None = None) -> dict[str, Any]:
        """What an arm contributes to a row; no time on a red gate."""
        return {
            "samples": {k: tuple(v) for k, v in (samples or {}).items()},
            "setup_s": arm.setup_s,
            "setup_cached": arm.cached,
            "warmups": arm.warmups,
            "peak_bytes": arm.peak_bytes,
            "weight_bytes": arm.weight_bytes,
            "least_bytes": arm.least_bytes,
            "precision": arm.precision,
            "scores": arm.scores,
            "proof": arm.proof,
            "notes": arm.notes,
        }

    # The parts of a climb

    def _incumbent(self) -> Arm:
        """The running arm of the plan that is kept; opened when first needed."""
        if self._arm is None or str(self._arm.plan) != str(self.plan):
            close(self._arm)
            self._arm = None
            try:
                self._arm = open_arm(self.pool, self.course, self.plan)
                measure_peak(self._arm, self.course)
            except WorkerFailed as failure:
                raise WorkloadError(f"{self.settings.workload} under {self.plan}: {failure}.") from failure
        return self._arm

    def _baseline(self) -> None:
        known = self.known.get(("baseline", "", "", ""))
        if known is None:
            self.listen("timing the model as it is", None)
            arm = self._incumbent()
            if not arm.passed:
                red = next(score for score in arm.scores if not score.passed)
                raise WorkloadError(
                    f"{self.settings.workload}: the untouched model fails its own gate ({red}); is it random, or the limit "
                    "below what its arithmetic can reach?"
                )
            (samples,) = take_turns([arm], self.course)
            known = self._row("baseline", self.plan, "baseline", "the model as it is", **self._seen(arm, samples))
        self._record(known, "eager: the baseline")
        self.best_compile: Measurement | None = None

    def _compile_baselines(self) -> None:
        """torch.compile on the untouched model: beating eager alone proves nothing."""
        if self.settings.objective == "memory":
            return
        for mode in _COMPILE_MODES[self.machine.device.partition(":")[0]]:
            rung = parse_rung(f"compile(mode={mode})")
            if self._spent():
                break
            row = self._trial("compile", rung, Plan((rung,)), baseline=True)
            if row.samples and (self.best_compile is None or _faster(row, self.best_compile)):
                self.best_compile = row

    def _candidates(self) -> Iterator[Rung]:
        """The rungs to try, in order, with their variants."""
        chosen = [parse_rung(text) for text in self.settings.only]
        left_out = {parse_rung(text).name for text in self.settings.without}
        for name, cls in RUNGS.items():
            if name in left_out:
                continue
            named = [rung for rung in chosen if rung.name == name]
            if self.settings.only and not named:
                continue
            if (self.facts["training"] and not cls.training) or (not self.facts["training"] and not cls.inference):
                continue
            plain = not named or named == [cls()]
            yield from cls.variants(self.machine) if plain else named

    def _step(self, role: str, rung: Rung) -> None:
        """Tries one rung on top of what is kept."""
        if self.rows and any(self._target_reached(row) for row in self.rows if row.verdict == "kept"):
            return
        candidate = self.plan.with_rung(rung)
        if str(candidate) == str(self.plan):
            return
        if self._spent():
            self._record(self._row(role, candidate, "unmeasured", "the budget was spent", rung=str(rung)))
            return
        row = self._trial(role, rung, candidate)
        if row.verdict == "kept":
            self.plan = Plan.parse(row.plan)

    def _trial(self, role: str, rung: Rung, candidate: Plan, baseline: bool = False) -> Measurement:
        """Measures the candidate against the kept plan; every failure is a row with its reason."""
        key = (role, str(rung), str(self.plan), "")
        if key in self.known:
            return self._record(self.known[key])
        about: dict[str, Any] = {"rung": str(rung), "against": str(self.plan)}
        reason = find_rung(rung.name).why_not(rung, self.machine)
        if reason:
            return self._record(self._row(role, candidate, "unavailable", reason, **about))
        self.listen(f"trying {rung}", None)
        arm: Arm | None = None
        try:
            incumbent: Arm | None = self._incumbent()
            try:
                arm = open_arm(self.pool, self.course, candidate, timeout_s=self._timeout_s())
            except WorkerFailed as failure:
                if failure.kind != "oom" or not self.machine.is_cuda:
                    raise
                # Two plans side by side need twice the memory: let the candidate have the device to itself.
                close(self._arm)
                self._arm = incumbent = None
                arm = open_arm(self.pool, self.course, candidate, timeout_s=self._timeout_s())
            if not arm.passed:
                red = next(score for score in arm.scores if not score.passed)
                return self._record(self._row(role, arm.plan, "refused", f"outside the gate: {red}", **about, **self._seen(arm)))
            measure_peak(arm, self.course)
            notes: tuple[str, ...] = ()
            if incumbent is not None:
                old, new = take_turns([incumbent, arm], self.course)
            else:
                (new,) = take_turns([arm], self.course)
                close(arm)
                incumbent = self._incumbent()
                (old,) = take_turns([incumbent], self.course)
                notes = ("both plans do not fit in memory together, so they were timed one after the other",)
            verdict, reason = self._judge(arm, incumbent, compare(old, new))
            if baseline:
                verdict, reason = "baseline", f"torch.compile on the untouched model; {reason}"
            seen = self._seen(arm, new)
            seen["notes"] = (*arm.notes, *notes)
            about["against_samples"] = {k: tuple(v) for k, v in old.items()}
            row = self._record(self._row(role, arm.plan, verdict, reason, **about, **seen))
            if verdict == "kept" and role != "ablation":
                close(self._arm)
                self._arm, arm = (arm if not notes else None), None
            return row
        except WorkerFailed as failure:
            verdict = failure.kind if failure.kind in ("unavailable", "refused") else "failed"
            text = {"oom": f"out of memory: {failure}"}.get(failure.kind, str(failure))
            return self._record(self._row(role, candidate, verdict, text, **about))
        finally:
            close(arm)

    def _judge(self, arm: Arm, incumbent: Arm, ratio: Interval) -> tuple[str, str]:
        span = f"{ratio.middle:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"
        if self.settings.objective == "memory":
            share = arm.peak_bytes / max(incumbent.peak_bytes, 1)
            sizes = f"{format_bytes(incumbent.peak_bytes)} → {format_bytes(arm.peak_bytes)}, speed {span}"
            if share < _SMALLER:
                return "kept", f"smaller: {sizes}"
            if share < 1 / _SMALLER and ratio.above(WORTHWHILE):
                return "kept", f"as small, and faster: {sizes}"
            return "dropped", f"not smaller: {sizes}"
        if ratio.above(WORTHWHILE):
            return "kept", f"{span} faster"
        if ratio.below(1.0):
            return "dropped", f"slower: {span}"
        return "dropped", f"no gain beyond the noise: {span}"

    def _second_look(self) -> None:
        """What did not help alone may help under a compiler that was kept later (and costs little to ask again)."""
        last = max((rung.stage for rung in self.plan.rungs), default=Stage.STRUCTURE)
        if last < Stage.COMPILE:
            return
        for row in [row for row in self.rows if row.role == "trial" and row.verdict == "dropped"]:
            rung = parse_rung(row.rung)
            if rung.stage < Stage.COMPILE and rung.second_look and rung.name not in self.plan:
                self._step("second look", rung)

    def _ablate(self) -> None:
        """Removes each kept rung once: what it is worth in the final plan, and out if that is nothing."""
        if len(self.plan.rungs) < 2:
            return
        for rung in self.plan.rungs:
            if self._spent():
                self._record(self._row("ablation", self.plan.without(rung.name), "unmeasured", "the budget was spent", rung=str(rung)))
                continue
            smaller = self.plan.without(rung.name)
            row = self._ablation(rung, smaller)
            if row.verdict == "dropped":
                self.plan = Plan.parse(row.plan)

    def _ablation(self, rung: Rung, smaller: Plan) -> Measurement:
        """Verdict "dropped" when the plan is as good without the rung."""
        key = ("ablation", str(rung), str(self.plan), "")
        if key in self.known:
            return self._record(self.known[key])
        self.listen(f"removing {rung}", None)
        about: dict[str, Any] = {"rung": str(rung), "against": str(self.plan)}
        arm: Arm | None = None
        try:
            whole = self._incumbent()
            arm = open_arm(self.pool, self.course, smaller, timeout_s=self._timeout_s())
            if not arm.passed:
                return self._record(
                    self._row("ablation", smaller, "kept", "the gate needs it: red without it", **about, **self._seen(arm))
                )
            measure_peak(arm, self.course)
            old, new = take_turns([whole, arm], self.course)
            ratio = compare(new, old)  # how many times faster the plan is *with* the rung
            span = f"{ratio.middle:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"
            if self.settings.objective == "memory":
                worth = whole.peak_bytes < _SMALLER * arm.peak_bytes or (
                    whole.peak_bytes <= arm.peak_bytes / _SMALLER and ratio.above(1.0)
                )
                span = f"{format_bytes(arm.peak_bytes)} without it, speed {span}"
            else:
                worth = ratio.above(1.0)
            verdict = "kept" if worth else "dropped"
            reason = f"worth {span} in the whole plan" if worth else f"made useless by the others: {span}"
            about["against_samples"] = {k: tuple(v) for k, v in old.items()}
            row = self._record(self._row("ablation", arm.plan, verdict, reason, **about, **self._seen(arm, new)))
            if not worth:
                close(self._arm)
                self._arm, arm = arm, None
            return row
        except WorkerFailed as failure:
            return self._record(self._row("ablation", smaller, "kept", f"the others do not run without it: {failure}", **about))
        finally:
            close(arm)

    def _rivals(self) -> list[Plan]:
        """Who the final plan races: eager, the best torch.compile, and eager bf16 where bf16 runs."""
        plans = [Plan()]
        if self.best_compile is not None:
            plans.append(Plan.parse(self.best_compile.plan))
        bf16 = find_rung("bf16")()
        if self.settings.objective != "memory" and not bf16.why_not(self.machine) and "bf16" in [r.rung for r in self.rows if r.samples]:
            plans.append(Plan((bf16,)))
        return [plan for plan in plans if str(plan) != str(self.plan)]

    def _final(self) -> None:
        """The final plan against its rivals, interleaved, judged on inputs that nothing has seen before."""
        close(self._arm)
        self._arm = None
        self.listen("the final race", None)
        arms: list[Arm] = []
        notes: tuple[str, ...] = ()
        try:
            for plan in [*self._rivals(), self.plan]:
                try:
                    arms.append(open_arm(self.pool, self.course, plan, FRESH_SEEDS))
                except WorkerFailed as failure:
                    if str(plan) in ("eager", str(self.plan)):
                        raise
                    notes += (f"{plan} could not run in the final race: {failure}",)
            arms = self._without_red(arms)
            for arm in arms:
                measure_peak(arm, self.course)
            taken = take_turns(arms, self.course, sampling_s=2 * self.course.sampling_s)
            winner = self._winner(arms, taken)
            self.plan = arms[winner].plan
            eager = taken[0]
            for index, (arm, samples) in enumerate(zip(arms, taken, strict=True)):
                last = index == winner
                about = {"against": "eager", "against_samples": {k: tuple(v) for k, v in eager.items()}}
                reason = self._final_reason(arm, compare(eager, samples)) if last else "raced against the final plan"
                seen = self._seen(arm, samples)
                seen["notes"] = (*arm.notes, *(notes if last else ()))
                about = about if str(arm.plan) != "eager" else {}
                verdict = "kept" if last else "baseline"
                self._record(self._row("final", arm.plan, verdict, reason, **about, **seen))
        except WorkerFailed as failure:
            raise RedlineError(f"the final plan {self.plan} did not run again: {failure}.") from failure
        finally:
            close(*arms)

    def _without_red(self, arms: list[Arm]) -> list[Arm]:
        """A plan that fails its gate on fresh inputs is out, whatever it won before."""
        green = []
        for arm in arms:
            if arm.passed:
                green.append(arm)
                continue
            red = next(score for score in arm.scores if not score.passed)
            self._record(self._row("final", arm.plan, "refused", f"outside the gate on fresh inputs: {red}", **self._seen(arm)))
            close(arm)
        if not green:
            raise WorkloadError(f"{self.settings.workload}: the untouched model fails its own gate on fresh inputs.")
        return green

    def _winner(self, arms: list[Arm], taken: list[dict[str, list[float]]]) -> int:
        """The climbed plan, unless a rival beats it beyond the noise."""
        best = len(arms) - 1
        for index in range(len(arms)):
            if self.settings.objective == "memory":
                if arms[index].peak_bytes < _SMALLER * arms[best].peak_bytes:
                    best = index
            elif index != best and compare(taken[best], taken[index]).above(1.0):
                best = index
        return best

    def _final_reason(self, arm: Arm, ratio: Interval) -> str:
        if not arm.plan.rungs:
            return "nothing beat the model as it is"
        return f"{ratio.middle:.2f}× ({ratio.low:.2f}–{ratio.high:.2f}) over eager, {format_seconds(_step_s(arm))} a step"


def _step_s(arm: Arm) -> float:
    return next(iter(arm.step_s.values()))


def _faster(one: Measurement, other: Measurement) -> bool:
    return geometric_mean_s({s: list(v) for s, v in one.samples.items()}) < geometric_mean_s(
        {s: list(v) for s, v in other.samples.items()}
    )


__all__ = ["OBJECTIVES", "Climbed", "Settings", "ask_machine", "climb", "make_references", "replace"]
