"""Measures a plan again on this machine, and names the rungs that no longer run, pass their gates or gain anything."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from redline.choices import CALLERS
from redline.errors import WorkloadError
from redline.ladder.measuring.size_sweep import sweep
from redline.ladder.measuring.trial import (
    FRESH_SEEDS,
    Arm,
    TrialSpec,
    close,
    compare_arms,
    geometric_mean_s,
    measure_peak,
    open_arm,
    take_turns,
)
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import ANY, Objective
from redline.ladder.plan import Plan, read_plan
from redline.ladder.rung import Rung
from redline.ladder.search.preparation import address_of, ask_machine, prepare_trials
from redline.ladder.search.progress import Progress, no_progress, print_progress
from redline.ladder.search.settings import Settings, read_duration
from redline.ladder.shape_ranges import FAILS, ShapeRange, Shapes, SizeResult, describe_range, read_ranges, read_shapes
from redline.ladder.statistics import Interval
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import check_file
from redline.machine.machine import Machine


@dataclass(frozen=True)
class RungVerdict:
    """Whether a rung still holds, and why. `worth` is the speed-up of the whole plan over the plan without the rung."""

    rung: str
    holds: bool
    reason: str
    worth: Interval | None = None


@dataclass(frozen=True)
class Verified:
    """The result of `verify`: whether the plan still holds, why, and the measured values."""

    plan: Plan
    objective: str
    machine: Machine
    holds: bool
    reason: str
    speedup: Interval | None
    median_s: float
    peak_bytes: int
    eager_peak_bytes: int
    scores: tuple[str, ...]
    rungs: tuple[RungVerdict, ...]
    # What the plan did at each size of the ranges of shapes, by range, and a sentence for each range.
    sizes: Mapping[str, tuple[SizeResult, ...]] = field(default_factory=dict)
    ranges: tuple[str, ...] = ()


def verify(
    plan: Plan | str | os.PathLike[str],
    workload: str | Workload,
    *,
    objective: str | None = None,
    callers: int = CALLERS,
    shapes: Shapes | None = None,
    device: str = "auto",
    timeout: str | float = "5m",
    sampling: str | float = "6s",
    progress: Progress | None = print_progress,
) -> Verified:
    """Times the whole plan against eager, and then against the plan without each of its rungs.

    Args:
        plan: A `Plan`, a plan in one line, or a plan file.
        workload: A `Workload`, or the address of a function that returns one.
        objective: `"latency"`, `"p99"`, `"throughput"`, `"requests"` or `"memory"`, as in `redline.climb`; by default
            the one in the plan, or latency.
        callers: The number of concurrent callers of the objective `"requests"`.
        shapes: Input shapes as options of the workload's function: `[{"batch": 1}, {"batch": 8}]`. A range,
            `[{"batch": range(1, 33)}]`, is timed at both ends and between; at the end the plan tries the other
            sizes, and the result says where it sets up again, falls back or fails.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        timeout: Time limit of one trial.
        sampling: Time for timing the two plans of one comparison.
        progress: Called with each event's text. By default events are printed to stderr; None prints nothing.
    """
    plan = read_plan(plan)
    progress = progress or no_progress
    check_file(workload)
    with WorkerPool() as pool:
        settings = Settings(
            address_of(workload, pool),
            shapes=read_shapes(shapes),
            ranges=read_ranges(shapes),
            device=device,
            objective=Objective.named(objective or plan.objective or "latency"),
            callers=callers,
            timeout_s=read_duration(timeout),
            sampling_s=read_duration(sampling),
        )
        progress("running the untouched model for reference", None)
        # Comes before the measurement of the ceilings, which takes seconds, so that a wrong address fails at once.
        spec, facts = prepare_trials(pool, settings, ask_machine(pool, device, measure=False))
        machine = ask_machine(pool, device)
        return _Verification(pool, spec, plan, machine, progress, settings.ranges).run(facts.training)


class _Verification:
    def __init__(
        self,
        pool: WorkerPool,
        spec: TrialSpec,
        plan: Plan,
        machine: Machine,
        progress: Progress,
        ranges: tuple[ShapeRange, ...] = (),
    ) -> None:
        self.pool, self.spec, self.plan, self.machine, self.progress = pool, spec, plan, machine, progress
        self.ranges = ranges

    def run(self, training: bool) -> Verified:
        impossible = {rung.name: why for rung in self.plan.rungs if (why := _why_not(rung, self.machine, training))}
        self.progress("timing the model as it is", None)
        try:
            eager = self._open(Plan())
        except WorkerFailed as failure:
            raise WorkloadError(f"{self.spec.label}: the untouched model failed: {failure}.") from failure
        whole: Arm | None = None
        speedup, median_s = None, float("nan")
        try:
            if impossible:
                reason = "the plan has rungs that cannot run here"
                unknown = "can run here; its gain is unknown, because the whole plan cannot run"
                rungs = [
                    RungVerdict(r.name, r.name not in impossible, impossible.get(r.name, unknown))
                    for r in self.plan.rungs
                ]
            else:
                reason = ""
                self.progress(f"timing {self.plan}", None)
                try:
                    whole = self._open(self.plan)
                except WorkerFailed as failure:
                    reason = f"the plan does not run: {failure}"
                rungs = [self._check_rung(rung.name, whole) for rung in self.plan.rungs]
            if whole is not None and whole.failed_score is not None:
                reason = f"outside the gate: {whole.failed_score}"
            elif whole is not None:
                reason, speedup, median_s = self._race(eager, whole)
            sizes = self._sweep(whole) if whole is not None and speedup is not None else {}
            failing = [result for results in sizes.values() for result in results if result.event == FAILS]
            if failing and not reason:
                reason = f"the plan fails at {failing[0].shape}: {failing[0].reason}"
            failed = [verdict.rung for verdict in rungs if not verdict.holds]
            if failed and not reason:
                reason = f"no longer holds: {', '.join(failed)}"
            return Verified(
                plan=self.plan,
                objective=self.spec.objective.value,
                machine=self.machine,
                holds=not reason,
                reason=reason or "every rung holds",
                speedup=speedup,
                median_s=median_s,
                peak_bytes=whole.peak_bytes if whole is not None else 0,
                eager_peak_bytes=eager.peak_bytes,
                scores=tuple(map(str, whole.scores)) if whole is not None else (),
                rungs=tuple(rungs),
                sizes=sizes,
                ranges=tuple(describe_range(one.label, sizes[one.label], one.count) for one in self.ranges if sizes),
            )
        finally:
            close(eager, whole)

    def _open(self, plan: Plan) -> Arm:
        arm = open_arm(self.pool, self.spec, plan, FRESH_SEEDS)
        measure_peak(arm, self.spec)
        return arm

    def _sweep(self, whole: Arm) -> dict[str, tuple[SizeResult, ...]]:
        if self.ranges:
            self.progress("trying every size of the shapes", None)
        return sweep(whole, self.spec, self.ranges, self.spec.timeout_s)

    def _race(self, eager: Arm, whole: Arm) -> tuple[str, Interval | None, float]:
        """Times the plan against eager; returns what is wrong (or ""), the speed-up and the step time."""
        try:
            old, new = take_turns([eager, whole], self.spec, sampling_s=2 * self.spec.sampling_s)
        except WorkerFailed as failure:
            if failure.pid != whole.worker.pid:
                raise WorkloadError(f"{self.spec.label}: the untouched model failed: {failure}.") from failure
            return f"the plan failed while it was timed: {failure}", None, float("nan")
        comparison = compare_arms(self.spec, eager, whole, old, new)
        better, gain = self.spec.objective.judge(comparison, ANY)
        reason = f"the plan is no better than eager: {gain}" if self.plan.rungs and not better else ""
        return reason, comparison.ratio, geometric_mean_s(new)

    def _check_rung(self, name: str, whole: Arm | None) -> RungVerdict:
        """Compares the plan with the plan without this rung; `whole` is the plan's arm, or None if it does not run."""
        self.progress(f"{'timing' if whole is not None else 'running'} the plan without {name}", None)
        arm: Arm | None = None
        try:
            arm = open_arm(self.pool, self.spec, self.plan.without(name), FRESH_SEEDS)
            if whole is None:
                return RungVerdict(name, False, "the plan runs without this rung")
            if not whole.passed and arm.passed:
                return RungVerdict(name, False, "the gate passes without this rung")
            if not whole.passed:
                return RungVerdict(name, True, "the gate fails without this rung too")
            if not arm.passed:
                return RungVerdict(name, True, "the gate fails without this rung")
            measure_peak(arm, self.spec)
            with_rung, without_rung = take_turns([whole, arm], self.spec)
            comparison = compare_arms(self.spec, arm, whole, without_rung, with_rung)
            return RungVerdict(name, *self.spec.objective.judge(comparison), comparison.ratio)
        except WorkerFailed as failure:
            if whole is None:
                return RungVerdict(name, True, "the plan does not run without this rung either")
            unknown = failure.kind in ("oom", "timeout") or failure.pid == whole.worker.pid
            problem = "the gain of this rung is unknown" if unknown else "the other rungs do not run without this rung"
            return RungVerdict(name, True, f"{problem}: {failure}")
        finally:
            close(arm)


def _why_not(rung: Rung, machine: Machine, training: bool) -> str:
    if training and not rung.training:
        return "this rung is for inference only"
    if not training and not rung.inference:
        return "this rung is for training only"
    return rung.why_not(machine)
