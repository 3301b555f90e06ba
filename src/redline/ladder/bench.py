"""Benchmarks: workloads × plans, saved as raw samples, and compared with an earlier run of the same machine."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.errors import MachineError, MeasurementError
from redline.files.atomic import write_text
from redline.files.untrusted import read_json
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import FRESH_SEEDS, Arm, TrialSpec, close, measure_peak, open_arm, take_turns
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import Comparison, Objective
from redline.ladder.plan import Plan
from redline.ladder.search.run_log import RunLog
from redline.ladder.search.settings import Settings, ask_machine, prepare_trials
from redline.ladder.search.source_digest import describe_change
from redline.ladder.statistics import CONFIDENCE, Interval
from redline.machine.machine import Machine

SCHEMA = 1


@dataclass(frozen=True)
class Change:
    """One workload under one plan, now against then."""

    workload: str
    plan: str
    shape: str
    then_s: float
    now_s: float
    ratio: Interval  # then / now: above one is faster
    then_bytes: int
    now_bytes: int
    verdict: str  # "faster", "slower", "same", "larger", "smaller" or "missing"
    note: str = ""  # what else is different


def bench(
    workloads: Sequence[str],
    plans: Sequence[Plan],
    shapes: Mapping[str, Mapping[str, Any]],
    device: str = "auto",
    objective: str = "latency",
    timeout_s: float = 300.0,
    sampling_s: float = 6.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Every workload under every plan, the plans of one workload interleaved with each other."""
    asked = [
        Settings(
            workload,
            Path("."),
            shapes,
            device,
            objective=objective,
            timeout_s=timeout_s,
            sampling_s=sampling_s,
        )
        for workload in workloads
    ]
    with WorkerPool() as pool:
        machine = ask_machine(pool, device, measure=False)
        laid = []
        # Every workload first: a wrong address must not wait for the others.
        for settings in asked:
            say(f"{settings.workload}: running the untouched model for reference")
            laid.append(prepare_trials(pool, settings, machine))
        machine = ask_machine(pool, device)
        return [row for spec, facts in laid for row in _bench_one(pool, spec, plans, machine, facts, say)]


def _bench_one(
    pool: WorkerPool,
    spec: TrialSpec,
    plans: Sequence[Plan],
    machine: Machine,
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[Measurement]:
    log = RunLog(spec, machine, facts)
    arms: list[Arm] = []
    try:
        for plan in plans:
            say(f"{spec.address}: setting up {plan}")
            reason = next((f"{r.name}: {why}" for r in plan.rungs if (why := r.why_not(machine))), "")
            if reason:
                log.record(log.row("bench", plan, "unavailable", reason))
                continue
            arm: Arm | None = None
            try:
                arm = open_arm(pool, spec, plan, FRESH_SEEDS)
                if arm.passed:
                    measure_peak(arm, spec)
            except WorkerFailed as failure:
                close(arm)
                verdict = "unavailable" if failure.kind == "unavailable" else "failed"
                log.record(log.row("bench", plan, verdict, str(failure)))
                continue
            if arm.passed:
                arms.append(arm)
                continue
            red = next(score for score in arm.scores if not score.passed)
            log.record(log.row("bench", plan, "refused", f"outside the gate: {red}", arm))
            close(arm)
        while arms:
            say(f"{spec.address}: timing {len(arms)} plan(s) in turn")
            try:
                taken = take_turns(arms, spec)
            except WorkerFailed as failure:
                # One that dies on the way is a row, and the others start again.
                dead = next(arm for arm in arms if arm.worker.pid == failure.pid)
                log.record(log.row("bench", dead.plan, "failed", str(failure)))
                close(dead)
                arms.remove(dead)
                continue
            for arm, samples in zip(arms, taken, strict=True):
                log.record(log.row("bench", arm.plan, "baseline", "measured", arm, samples))
            break
    finally:
        close(*arms)
    return log.rows


def save(path: Path, rows: Sequence[Measurement]) -> None:
    # Through its own JSON, which has no NaN for the score of a red gate.
    found = [json.loads(row.to_json()) for row in rows]
    write_text(path, json.dumps({"schema": SCHEMA, "measurements": found}, indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> list[Measurement]:
    document = read_json(path, "benchmark", MeasurementError)
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise MeasurementError(f"{str(path)!r} is not a saved benchmark.")
    if document["schema"] > SCHEMA:
        raise MeasurementError(
            f"{str(path)!r} is of schema {document['schema']}, newer than this Redline reads ({SCHEMA})."
        )
    rows = document.get("measurements")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MeasurementError(f"{str(path)!r} is damaged: `measurements` is not a list of them.")
    if not rows:
        raise MeasurementError(f"{str(path)!r} holds no measurement.")
    return [Measurement.from_dict(row, repr(str(path))) for row in rows]


def compare_runs(then: Sequence[Measurement], now: Sequence[Measurement], any_machine: bool = False) -> list[Change]:
    """What changed beyond the noise; refuses to compare different machines unless told, and objectives ever."""
    asked = sorted({row.objective for row in (*then, *now)})
    if len(asked) > 1:
        raise MeasurementError(
            f"the two runs have different objectives ({' and '.join(asked)}), so they do not compare."
        )
    fingerprints = {row.machine.get("fingerprint") for row in (*then, *now)}
    if len(fingerprints) > 1 and not any_machine:
        names = sorted(
            {
                f"{row.machine.get('name')} (torch {row.machine.get('versions', {}).get('torch')})"
                for row in (*then, *now)
            }
        )
        raise MachineError(
            f"the two runs come from different machines ({' and '.join(names)}); "
            "--any-machine compares them all the same."
        )
    earlier = {(row.workload, row.plan, shape): row for row in then for shape in row.shapes}
    changes = []
    for row in now:
        for shape in row.shapes:
            old = earlier.pop((row.workload, row.plan, shape), None)
            if old is not None:
                changes.append(_change(old, row, shape))
    for (workload, plan, shape), old in earlier.items():
        nothing = Interval(float("nan"), float("nan"), float("nan"))
        changes.append(
            Change(
                workload,
                plan,
                shape,
                old.median_s(shape),
                float("nan"),
                nothing,
                old.peak_bytes,
                0,
                "missing",
            )
        )
    return changes


def _change(old: Measurement, new: Measurement, shape: str) -> Change:
    ratio = unpaired_ratio(old.samples[shape], new.samples[shape])
    comparison = Comparison(ratio, new.peak_bytes, old.peak_bytes, str(new.machine.get("device", "cpu")))
    note = ""
    if old.digest != new.digest:
        what = describe_change(old.sources, new.sources) or "its gates or its reference have changed"
        note = f"another workload than then: {what}"
    return Change(
        new.workload,
        new.plan,
        shape,
        old.median_s(shape),
        new.median_s(shape),
        ratio,
        old.peak_bytes,
        new.peak_bytes,
        Objective.named(new.objective).change(comparison),
        note,
    )


def unpaired_ratio(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Old over new for samples taken at different times: both medians are resampled on their own."""
    rng = np.random.default_rng(0)
    a, b = np.asarray(old), np.asarray(new)
    ratios = np.median(a[rng.integers(0, len(a), (2000, len(a)))], axis=1) / np.median(
        b[rng.integers(0, len(b), (2000, len(b)))], axis=1
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))
