"""Re-measures a plan on this machine and names the rungs that no longer hold."""

from collections.abc import Callable
from dataclasses import dataclass

from redline.errors import WorkloadError
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
from redline.ladder.objective import ANY
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung
from redline.ladder.search.settings import Settings, ask_machine, prepare_trials
from redline.ladder.statistics import Interval
from redline.machine.machine import Machine

_UNKNOWN = "can run here; the whole plan does not, so its worth is unknown"


@dataclass(frozen=True)
class RungVerdict:
    rung: str
    holds: bool
    reason: str
    # How many times faster the whole plan is with this rung than without it.
    worth: Interval | None = None


@dataclass(frozen=True)
class Verified:
    plan: str
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


def verify(plan: Plan, settings: Settings, say: Callable[[str], None] = lambda _: None) -> Verified:
    """The whole plan against eager, then every rung left out once."""
    with WorkerPool() as pool:
        say("running the untouched model for reference")
        # The workload first: a wrong address must not wait for the ceilings to be measured.
        spec, facts = prepare_trials(pool, settings, ask_machine(pool, settings.device, measure=False))
        machine = ask_machine(pool, settings.device)
        return _verify(pool, spec, plan, machine, facts["training"], say)


def _verify(
    pool: WorkerPool, spec: TrialSpec, plan: Plan, machine: Machine, training: bool, say: Callable[[str], None]
) -> Verified:
    impossible = {rung.name: reason for rung in plan.rungs if (reason := _cannot(rung, machine, training))}
    say("timing the model as it is")
    try:
        eager = open_arm(pool, spec, Plan(), FRESH_SEEDS)
        measure_peak(eager, spec)
    except WorkerFailed as failure:
        raise WorkloadError(f"{spec.address}: the untouched model failed: {failure}.") from failure
    whole: Arm | None = None
    reason = ""
    try:
        if impossible:
            reason = "the plan has rungs that cannot run here"
        else:
            say(f"timing {plan}")
            try:
                whole = open_arm(pool, spec, plan, FRESH_SEEDS)
                measure_peak(whole, spec)
            except WorkerFailed as failure:
                reason = f"the plan does not run: {failure}"
        names = [rung.name for rung in plan.rungs]
        if impossible:  # they are to blame, and the others are not asked
            verdicts = tuple(RungVerdict(n, n not in impossible, impossible.get(n, _UNKNOWN)) for n in names)
        else:
            verdicts = tuple(_check_rung(pool, spec, plan, name, whole, say) for name in names)
        speedup, median_s = None, float("nan")
        if whole is not None and whole.passed:
            try:
                old, new = take_turns([eager, whole], spec, sampling_s=2 * spec.sampling_s)
                comparison = compare_arms(eager, whole, old, new)
                speedup, median_s = comparison.ratio, geometric_mean_s(new)
                better, gain = spec.objective.judge(comparison, ANY)
                if plan.rungs and not better:
                    reason = f"the plan is no better than eager: {gain}"
            except WorkerFailed as failure:
                if failure.pid != whole.worker.pid:
                    raise WorkloadError(f"{spec.address}: the untouched model failed: {failure}.") from failure
                reason = f"the plan does not go on running: {failure}"
        elif whole is not None:
            reason = f"outside the gate: {next(s for s in whole.scores if not s.passed)}"
        fallen = [v.rung for v in verdicts if not v.holds]
        if fallen and not reason:
            reason = f"no longer holds: {', '.join(fallen)}"
        return Verified(
            plan=str(plan),
            objective=spec.objective.value,
            machine=machine,
            holds=not reason,
            reason=reason or "every rung holds",
            speedup=speedup,
            median_s=median_s,
            peak_bytes=whole.peak_bytes if whole is not None else 0,
            eager_peak_bytes=eager.peak_bytes,
            scores=tuple(str(s) for s in whole.scores) if whole is not None else (),
            rungs=verdicts,
        )
    finally:
        close(eager, whole)


def _cannot(rung: Rung, machine: Machine, training: bool) -> str:
    if training and not rung.training:
        return "it is for inference only"
    if not training and not rung.inference:
        return "it is for training only"
    return rung.why_not(machine)


def _check_rung(
    pool: WorkerPool,
    spec: TrialSpec,
    plan: Plan,
    name: str,
    whole: Arm | None,
    say: Callable[[str], None],
) -> RungVerdict:
    say(f"{'timing' if whole is not None else 'running'} the plan without {name}")
    arm: Arm | None = None
    try:
        arm = open_arm(pool, spec, plan.without(name), FRESH_SEEDS)
        if whole is None:
            return RungVerdict(name, False, "the plan runs without it")
        if not whole.passed:
            blame = arm.passed
            return RungVerdict(
                name, not blame, "the gate is green without it" if blame else "not what turns the gate red"
            )
        if not arm.passed:
            return RungVerdict(name, True, "the gate needs it")
        measure_peak(arm, spec)
        with_rung, without_rung = take_turns([whole, arm], spec)
        comparison = compare_arms(arm, whole, without_rung, with_rung)
        return RungVerdict(name, *spec.objective.judge(comparison), comparison.ratio)
    except WorkerFailed as failure:
        if whole is None:
            return RungVerdict(name, True, "not what keeps the plan from running, as far as can be seen")
        unknown = failure.kind in ("oom", "timeout") or failure.pid == whole.worker.pid
        said = "its worth is unknown" if unknown else "the others do not run without it"
        return RungVerdict(name, True, f"{said}: {failure}")
    finally:
        close(arm)
