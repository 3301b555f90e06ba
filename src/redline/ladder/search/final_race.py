"""The final race: times eager, the climbed plan and other plans in turns, on inputs that no trial has used."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from redline.errors import WorkloadError
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.size_sweep import sweep
from redline.ladder.measuring.trial import (
    FRESH_SEEDS,
    Arm,
    Samples,
    TrialSpec,
    close,
    compare_arms,
    geometric_mean_s,
    judge_again,
    measure_peak,
    take_turns,
)
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.objective import ANY, Objective, above_limit, is_within
from redline.ladder.plan import Plan
from redline.ladder.search.parallel_setups import ParallelSetups
from redline.ladder.search.run_log import RunLog
from redline.ladder.shape_ranges import ShapeRange
from redline.machine.load import LoadMeter
from redline.notation import format_seconds

# If two times of the same plan differ by more than this factor, the machine's speed drifted between them.
_DRIFT = 1.25


def run_race(
    setups: ParallelSetups,
    spec: TrialSpec,
    log: RunLog,
    plan: Plan,
    alive: Mapping[Plan, Arm],
    barred: Sequence[str] = (),
    sampling_s: float = 0.0,
    notes: tuple[str, ...] = (),
    ranges: Sequence[ShapeRange] = (),
    sweep_s: float = 0.0,
) -> Measurement:
    """Times eager, the climbed plan and its rivals; records a row for each, and returns the winner's (verdict "kept").

    `alive` maps other plans to their running processes: these plans are judged on fresh inputs and become rivals, and
    the processes are closed at the end. A rival that contains one of the `barred` rungs (names, or rungs with options)
    is timed but cannot win. The winner tries the sizes of all `ranges` for at most `sweep_s`.
    """
    others = [rival for rival in alive if rival not in (Plan(), plan)]
    # The climbed plan is set up before its rivals, so that a rival is dropped if memory is too small for all.
    plans = [Plan(), *([plan] if plan.rungs else []), *others]
    arms, failures = _open_racers(setups, spec, log, plans, dict(alive))
    try:
        meter = LoadMeter([arm.worker.pid for arm in arms])
        taken, more = _take_turns(arms, spec, sampling_s or 2 * spec.sampling_s)
        load = asdict(meter.read())
        notes += (*failures, *more, *_drift_note(log, taken[0]))
        allowed = [not any(rung.name in barred or str(rung) in barred for rung in arm.plan.rungs) for arm in arms]
        gains = [row.speedup() for row in log.rows if row.plan == str(plan) and row.verdict == "kept"]
        verified = any(gain is not None and gain.low > 1 for gain in gains)
        winner = _winner(arms, taken, allowed, spec, plan, verified)
        # The winner's row is written last, so that the last line of a file is the result of the climb.
        for index in sorted(range(len(arms)), key=lambda index: index == winner):
            about: dict[str, Any] = {"load": load} | (
                {"against": "eager", "against_samples": taken[0]} if index else {}
            )
            verdict, reason, row_notes = "baseline", "raced against the final plan", ()
            over = not is_within(arms[index].peak_bytes, spec.max_bytes)
            if over:
                verdict, reason = "dropped", above_limit(arms[index].peak_bytes, spec.max_bytes)
            if index == winner and over:
                reason, row_notes = f"no plan is an answer; the best one is {reason}", notes
            elif index == winner:
                gain = spec.objective.gain(compare_arms(spec, arms[0], arms[index], taken[0], taken[index]))
                reason = f"{gain} over eager" if arms[index].plan.rungs else "nothing beat the model as it is"
                verdict, row_notes = "kept", notes
            if index == winner:
                about["ranges"] = sweep(arms[index], spec, ranges, sweep_s)
                about["range_counts"] = {one.label: one.count for one in ranges}
            row = log.row(
                "final",
                arms[index].plan,
                verdict,
                reason,
                arms[index],
                taken[index],
                notes=row_notes,
                **about,
            )
            log.record(row)
        return log.rows[-1]
    finally:
        close(*arms)


def _drift_note(log: RunLog, eager: Samples) -> tuple[str, ...]:
    """Returns a note if the machine's speed changed since the baseline was timed."""
    before = next((row.samples for row in log.rows if row.role == "baseline" and row.samples), None)
    if before is None:
        return ()
    then_s, now_s = geometric_mean_s(before), geometric_mean_s(eager)
    if 1 / _DRIFT < now_s / then_s < _DRIFT:
        return ()
    return (
        f"the model as it is took {format_seconds(then_s)} at the start and {format_seconds(now_s)} in the final race: "
        "the machine's speed changed in between, so compare speed-ups, not the times of different rows",
    )


def _take_turns(
    arms: list[Arm], spec: TrialSpec, sampling_s: float
) -> tuple[list[dict[str, list[float]]], tuple[str, ...]]:
    """Times all racers in turns. If one fails, removes it with a note and times the others from the start."""
    notes: tuple[str, ...] = ()
    while True:
        try:
            return take_turns(arms, spec, sampling_s=sampling_s), notes
        except WorkerFailed as failure:
            dead = next((arm for arm in arms[1:] if arm.worker.pid == failure.pid), None)
            if dead is None:
                raise WorkloadError(f"{spec.label}: the untouched model failed in the race: {failure}.") from failure
            notes += (f"{dead.plan} left the final race: {failure}",)
        close(dead)
        arms.remove(dead)


def _open_racers(
    setups: ParallelSetups, spec: TrialSpec, log: RunLog, plans: Sequence[Plan], alive: dict[Plan, Arm]
) -> tuple[list[Arm], tuple[str, ...]]:
    """Sets up the racers, eager first, and drops those that cannot run or that fail a gate on the fresh inputs."""
    arms: list[Arm] = []
    notes: tuple[str, ...] = ()
    try:
        for plan in plans:
            try:
                arm = _judged_again(alive.pop(plan), spec) if plan in alive else None
                if arm is None:
                    arm = setups.open(plan, FRESH_SEEDS)
                    measure_peak(arm, spec)
            except WorkerFailed as failure:
                if not plan.rungs:
                    text = f"{spec.label}: the untouched model did not run again: {failure}."
                    raise WorkloadError(text) from failure
                notes += (f"{plan} could not run in the final race: {failure}",)
                continue
            if arm.failed_score is None:
                arms.append(arm)
                continue
            close(arm)
            if not plan.rungs:
                raise WorkloadError(
                    f"{spec.label}: the untouched model fails its own gate on fresh inputs ({arm.failed_score})."
                )
            reason = f"outside the gate on fresh inputs: {arm.failed_score}"
            log.record(log.row("final", arm.plan, "refused", reason, arm))
    except BaseException:
        close(*arms, *alive.values())
        raise
    return arms, notes


def _judged_again(arm: Arm, spec: TrialSpec) -> Arm | None:
    """Judges a running process on the fresh inputs; closes it and returns None if it fails or is outside a gate.

    If the result is None, the caller judges the plan once more in a new process: a model that keeps state between calls
    may have changed in the running process, and the plan may have failed only for this reason.
    """
    with suppress(WorkerFailed):
        judge_again(arm, spec, FRESH_SEEDS)
        if arm.passed:
            return arm
    close(arm)
    return None


def _winner(
    arms: Sequence[Arm],
    taken: Sequence[Samples],
    allowed: Sequence[bool],
    spec: TrialSpec,
    favourite: Plan,
    verified: bool,
) -> int:
    """Returns the index of the winner, which is at first eager (index 0).

    The climbed plan and then each rival becomes the winner if it is better than the present winner beyond the noise.
    If a trial has `verified` the climbed plan, it only has to be faster in the median, because on a busy machine the
    confidence interval of a single race may include 1.
    """
    order = sorted(range(1, len(arms)), key=lambda i: arms[i].plan != favourite)
    best = 0
    for index in order:
        comparison = compare_arms(spec, arms[best], arms[index], taken[best], taken[index])
        better = spec.objective.judge(comparison, ANY)[0]
        if verified and arms[index].plan == favourite and spec.objective is not Objective.MEMORY and comparison.fits:
            better = better or comparison.ratio.middle > 1
        if allowed[index] and better:
            best = index
    return best
