"""The final race: the plan that was climbed against its rivals, interleaved, on inputs that nothing has seen before."""

from collections.abc import Sequence

from redline.errors import WorkloadError
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import (
    FRESH_SEEDS,
    Arm,
    Samples,
    TrialSpec,
    close,
    compare_arms,
    geometric_mean_s,
    measure_peak,
    take_turns,
)
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.objective import ANY, Objective
from redline.ladder.plan import Plan
from redline.ladder.search.parallel_setups import ParallelSetups, may_stand_beside_others
from redline.ladder.search.run_log import RunLog
from redline.notation import format_seconds

# Further apart than this, two times of the same plan are of two moods of the machine.
_MOOD = 1.25


def run_race(
    setups: ParallelSetups, spec: TrialSpec, log: RunLog, plan: Plan, rivals: Sequence[Plan], barred: Sequence[str] = ()
) -> Measurement:
    """Records a row per racer; the winner's verdict is "kept". Eager always runs, so that there is always a winner.

    A rival with a rung that the user left out (`barred`, by name or as written) is shown, and cannot win.
    """
    others = [rival for rival in rivals if str(rival) not in ("eager", str(plan))]
    # The climbed plan is opened before its rivals: if memory is short, they are the ones to stay away.
    arms, notes = _open_racers(setups, spec, log, [Plan(), *([plan] if plan.rungs else []), *others])
    try:
        taken, more = _race_to_the_end(arms, spec)
        notes += (*more, *_drift(log, taken[0]))
        allowed = [not any(rung.name in barred or str(rung) in barred for rung in arm.plan.rungs) for arm in arms]
        winner = _winner(arms, taken, allowed, spec.objective, favourite=str(plan))
        rows = []
        for index, (arm, samples) in enumerate(zip(arms, taken, strict=True)):
            last = index == winner
            reason = "raced against the final plan"
            if last:
                gain = spec.objective.gain(compare_arms(arms[0], arm, taken[0], samples))
                reason = f"{gain} over eager" if arm.plan.rungs else "nothing beat the model as it is"
            against = {"against": "eager", "against_samples": taken[0]} if index else {}
            rows.append(
                log.row(
                    "final",
                    arm.plan,
                    "kept" if last else "baseline",
                    reason,
                    arm,
                    samples,
                    notes=notes if last else (),
                    **against,
                )
            )
        # The winner is written last, so that a file always ends with its result.
        for row in sorted(rows, key=lambda row: row.verdict == "kept"):
            log.record(row)
        return log.rows[-1]
    finally:
        close(*arms)


def _drift(log: RunLog, eager: Samples) -> tuple[str, ...]:
    """What a reader of the whole table must know: times of other rows are of another mood of the machine."""
    before = next((row.samples for row in log.rows if row.role == "baseline" and row.samples), None)
    if before is None:
        return ()
    then_s, now_s = geometric_mean_s(before), geometric_mean_s(eager)
    if 1 / _MOOD < now_s / then_s < _MOOD:
        return ()
    return (
        f"the model as it is took {format_seconds(then_s)} at the start and {format_seconds(now_s)} in the final race: "
        "something else ran on this machine, so trust ratios taken in turns, not times of different rows",
    )


def _race_to_the_end(arms: list[Arm], spec: TrialSpec) -> tuple[list[dict[str, list[float]]], tuple[str, ...]]:
    """A racer that dies on the way leaves the race, and the others run it again."""
    notes: tuple[str, ...] = ()
    while True:
        try:
            return take_turns(arms, spec, sampling_s=2 * spec.sampling_s), notes
        except WorkerFailed as failure:
            dead = next((arm for arm in arms[1:] if arm.worker.pid == failure.pid), None)
            if dead is None:
                raise WorkloadError(f"{spec.address}: the untouched model failed in the race: {failure}.") from failure
            notes += (f"{dead.plan} left the final race: {failure}",)
        close(dead)
        arms.remove(dead)


def _open_racers(
    setups: ParallelSetups, spec: TrialSpec, log: RunLog, plans: Sequence[Plan]
) -> tuple[list[Arm], tuple[str, ...]]:
    """Eager first. A racer that cannot run, or whose gate is red on fresh inputs, is out, whatever it won before."""
    arms: list[Arm] = []
    notes: tuple[str, ...] = ()
    largest_bytes = max((row.peak_bytes for row in log.rows), default=0)
    together = may_stand_beside_others(plans)
    if setups.at_once(largest_bytes) >= len(together) > 1:
        setups.prepare({str(plan): spec.timeout_s for plan in together}, FRESH_SEEDS)
    for plan in plans:
        arm: Arm | None = None
        try:
            arm = setups.open(plan, FRESH_SEEDS)
            measure_peak(arm, spec)
        except WorkerFailed as failure:
            close(arm)
            if not plan.rungs:
                close(*arms)
                raise WorkloadError(f"{spec.address}: the untouched model did not run again: {failure}.") from failure
            notes += (f"{plan} could not run in the final race: {failure}",)
            continue
        if arm.passed:
            arms.append(arm)
            continue
        red = next(score for score in arm.scores if not score.passed)
        close(arm)
        if not plan.rungs:
            raise WorkloadError(f"{spec.address}: the untouched model fails its own gate on fresh inputs ({red}).")
        log.record(log.row("final", arm.plan, "refused", f"outside the gate on fresh inputs: {red}", arm))
    return arms, notes


def _winner(
    arms: Sequence[Arm], taken: Sequence[Samples], allowed: Sequence[bool], objective: Objective, favourite: str
) -> int:
    """Eager, unless the climbed plan is better beyond the noise; then that one, unless a rival is better still."""
    order = sorted(range(1, len(arms)), key=lambda i: str(arms[i].plan) != favourite)
    best = 0
    for index in order:
        comparison = compare_arms(arms[best], arms[index], taken[best], taken[index])
        if allowed[index] and objective.judge(comparison, ANY)[0]:
            best = index
    return best
