"""Benchmarks: times workloads under plans, saves raw samples, and compares with an earlier run on the same machine."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.choices import CALLERS
from redline.errors import MachineError, MeasurementError
from redline.files.atomic import write_text
from redline.files.untrusted import read_json
from redline.ladder.measurement import Measurement
from redline.ladder.measuring.trial import FRESH_SEEDS, Arm, TrialSpec, close, measure_peak, open_arm, take_turns
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.objective import Comparison, Objective
from redline.ladder.plan import Plan, read_plan
from redline.ladder.search.preparation import address_of, ask_machine, prepare_trials
from redline.ladder.search.progress import Progress, no_progress, print_progress
from redline.ladder.search.run_log import RunLog
from redline.ladder.search.settings import Settings, read_duration
from redline.ladder.search.source_digest import describe_change
from redline.ladder.shape_ranges import Shapes, read_shapes
from redline.ladder.statistics import Interval, unpaired_ratio
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import check_file

SCHEMA = 1


@dataclass(frozen=True)
class Change:
    """The change of one workload under one plan between an earlier run and this run."""

    workload: str
    plan: str
    shape: str
    then_s: float
    now_s: float
    ratio: Interval  # then / now: above one is faster
    then_bytes: int
    now_bytes: int
    verdict: str  # "faster", "slower", "same", "larger", "smaller" or "missing"
    note: str = ""  # what changed in the workload itself; empty if nothing did


@dataclass(frozen=True)
class BenchRun:
    """The measurements of a benchmark."""

    measurements: tuple[Measurement, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        # `to_json` writes NaN, the score of a failed gate, as null.
        rows = [json.loads(row.to_json()) for row in self.measurements]
        document = {"schema": SCHEMA, "measurements": rows}
        write_text(Path(path), json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BenchRun":
        name = repr(str(path))
        document = read_json(path, "benchmark", MeasurementError)
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise MeasurementError(f"{name} is not a saved benchmark.")
        if document["schema"] > SCHEMA:
            raise MeasurementError(
                f"{name} is of schema {document['schema']}, newer than this Redline reads ({SCHEMA})."
            )
        rows = document.get("measurements")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise MeasurementError(f"{name} is damaged: `measurements` is not a list of measurements.")
        if not rows:
            raise MeasurementError(f"{name} holds no measurement.")
        return cls(tuple(Measurement.from_dict(row, name) for row in rows))

    def compare(self, then: "BenchRun", any_machine: bool = False) -> list[Change]:
        """Returns the changes since an earlier run that exceed the noise.

        Raises if the objectives differ, or if the machines differ and `any_machine` is false.
        """
        rows = (*then.measurements, *self.measurements)
        objectives = sorted({row.objective for row in rows})
        if len(objectives) > 1:
            raise MeasurementError(
                f"cannot compare the two runs: they have different objectives ({' and '.join(objectives)})."
            )
        if len({row.callers for row in rows}) > 1:
            raise MeasurementError("cannot compare the two runs: they have different numbers of concurrent callers.")
        if len({row.machine.get("fingerprint") for row in rows}) > 1 and not any_machine:
            machines = {(r.machine.get("name"), r.machine.get("versions", {}).get("torch")) for r in rows}
            names = " and ".join(sorted(f"{name} (torch {torch})" for name, torch in machines))
            raise MachineError(
                f"cannot compare the two runs: they come from different machines ({names}); --any-machine (in Python, "
                "any_machine=True) compares them anyway."
            )
        earlier = {(row.workload, row.plan, shape): row for row in then.measurements for shape in row.shapes}
        changes = [
            _change(old, row, shape)
            for row in self.measurements
            for shape in row.shapes
            if (old := earlier.pop((row.workload, row.plan, shape), None)) is not None
        ]
        return changes + [_missing(old, shape) for (_, _, shape), old in earlier.items()]


def bench(
    workloads: Sequence[str | Workload],
    plans: Sequence[Plan | str | os.PathLike[str]] = ("eager",),
    *,
    objective: str = "latency",
    callers: int = CALLERS,
    shapes: Shapes | None = None,
    device: str = "auto",
    timeout: str | float = "5m",
    sampling: str | float = "6s",
    progress: Progress | None = print_progress,
) -> BenchRun:
    """Measures every workload under every plan; the plans of one workload are timed in turns.

    Args:
        workloads: `Workload`s, or addresses of functions that return one.
        plans: Each a `Plan`, a plan in one line (`"eager"` is the model as it is), or a plan file.
        objective: `"latency"`, `"p99"`, `"throughput"`, `"requests"` or `"memory"`, as in `redline.climb`.
        callers: The number of concurrent callers of the objective `"requests"`.
        shapes: Input shapes as options of the workloads' functions: `[{"batch": 1}, {"batch": 8}]`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        timeout: Time limit of one set-up.
        sampling: Time for timing two plans of one workload; n plans take n / 2 times as long.
        progress: Called with each event's text and, for a measurement, with the measurement. By default a line per
            measurement is printed to stderr; None prints nothing.
    """
    progress = progress or no_progress
    read = [read_plan(plan) for plan in plans]
    for workload in workloads:
        check_file(workload)
    with WorkerPool() as pool:
        machine = ask_machine(pool, device, measure=False)
        prepared = []
        # All workloads are loaded before the first is timed, so that a wrong address fails early.
        for workload in workloads:
            settings = Settings(
                address_of(workload, pool),
                shapes=read_shapes(shapes),
                device=device,
                objective=Objective.named(objective),
                callers=callers,
                timeout_s=read_duration(timeout),
                sampling_s=read_duration(sampling),
            )
            progress(f"{workload if isinstance(workload, str) else workload.label}: running the untouched model", None)
            prepared.append(prepare_trials(pool, settings, machine))
        machine = ask_machine(pool, device)
        rows: list[Measurement] = []
        for spec, facts in prepared:
            rows += _bench_one(pool, spec, read, RunLog(spec, machine, facts), progress)
        return BenchRun(tuple(rows))


def _bench_one(
    pool: WorkerPool, spec: TrialSpec, plans: Sequence[Plan], log: RunLog, progress: Progress
) -> list[Measurement]:
    def record(plan: Plan, verdict: str, reason: str, *seen: Any) -> None:
        row = log.record(log.row("bench", plan, verdict, reason, *seen))
        progress(f"{row.workload} under {row.plan}: {row.verdict}", row)

    arms: list[Arm] = []
    try:
        for plan in plans:
            progress(f"{spec.label}: setting up {plan}", None)
            reason = next((f"{r.name}: {why}" for r in plan.rungs if (why := r.why_not(log.machine))), "")
            if reason:
                record(plan, "unavailable", reason)
                continue
            try:
                arm = open_arm(pool, spec, plan, FRESH_SEEDS)
                if arm.passed:
                    measure_peak(arm, spec)
            except WorkerFailed as failure:
                record(plan, "unavailable" if failure.kind == "unavailable" else "failed", str(failure))
                continue
            if arm.passed:
                arms.append(arm)
                continue
            record(plan, "refused", f"outside the gate: {arm.failed_score}", arm)
            close(arm)
        while arms:
            progress(f"{spec.label}: timing {len(arms)} plan(s) in turn", None)
            try:
                taken = take_turns(arms, spec)
            except WorkerFailed as failure:
                # Records the plan that failed, and times the others again from the start.
                dead = next(arm for arm in arms if arm.worker.pid == failure.pid)
                record(dead.plan, "failed", str(failure))
                close(dead)
                arms.remove(dead)
                continue
            for arm, samples in zip(arms, taken, strict=True):
                record(arm.plan, "baseline", "measured", arm, samples)
            break
    finally:
        close(*arms)
    return log.rows


def _change(old: Measurement, new: Measurement, shape: str) -> Change:
    ratio = unpaired_ratio(old.samples[shape], new.samples[shape], new.objective == Objective.P99)
    comparison = Comparison(ratio, new.peak_bytes, old.peak_bytes, str(new.machine.get("device", "cpu")))
    note = ""
    if old.digest != new.digest:
        what = describe_change(old.sources, new.sources) or "its gates, FLOPs or reference dtype"
        note = f"the workload has changed: {what}"
    return Change(
        new.workload,
        new.plan,
        shape,
        old.time_s(shape),
        new.time_s(shape),
        ratio,
        old.peak_bytes,
        new.peak_bytes,
        Objective.named(new.objective).change(comparison),
        note,
    )


def _missing(old: Measurement, shape: str) -> Change:
    nan = float("nan")
    ratio = Interval(nan, nan, nan)
    return Change(old.workload, old.plan, shape, old.time_s(shape), nan, ratio, old.peak_bytes, 0, "missing")
