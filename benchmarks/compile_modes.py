"""Compares the plans found by climbs with every mode of torch.compile, including max-autotune, and with eager bf16.

    python benchmarks/compile_modes.py --results benchmarks/results/h200 --out compile_modes.jsonl [NAME …]

A climb limits autotuning to a share of its budget; here it has all the time it needs. Plans of all workloads are set up
in parallel (`--at-once`, `--searches`), because compilation leaves the GPU idle. Then the workloads are timed one after
another, the plans of each in turns, while nothing else runs. Rows have the format of `redline bench`; a plan that was
not ready in time has a row with the reason.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from climb_all import WORKLOADS

from redline.ladder.measurement import load_measurements
from redline.ladder.measuring.trial import (
    FRESH_SEEDS,
    Arm,
    TrialSpec,
    close,
    compare,
    measure_peak,
    open_arm,
    take_turns,
)
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.plan import Plan
from redline.ladder.search.preparation import WorkloadFacts, ask_machine, prepare_trials
from redline.ladder.search.run_log import RunLog
from redline.ladder.search.settings import Settings
from redline.ladder.statistics import median
from redline.notation import format_seconds, parse_seconds

MODES = ("compile", "compile(mode=reduce-overhead)", "compile(mode=max-autotune)")


@dataclass
class Entry:
    """A workload with the plan that its climb found and the plans to compare it with."""

    name: str
    found: str
    spec: TrialSpec
    facts: WorkloadFacts
    arms: list[Arm] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def plans(self) -> list[Plan]:
        return [Plan.parse(text) for text in dict.fromkeys((self.found, *MODES, "bf16"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares found plans with all modes of torch.compile.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="result files without .jsonl; default: all climbs")
    parser.add_argument("--results", type=Path, required=True, help="folder with the result files of the climbs")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows")
    parser.add_argument("--at-once", type=int, default=4, help="number of plans compiled in parallel")
    parser.add_argument("--searches", type=int, default=1, help="number of max-autotune plans compiled in parallel")
    parser.add_argument("--timeout", default="4m", help="time limit of one set-up")
    parser.add_argument("--set-up-for", default="1h", help="time limit of all set-ups; unfinished ones are skipped")
    parser.add_argument("--sampling", default="4s", help="time for the turns of one workload")
    arguments = parser.parse_args()
    names = arguments.names or [name for name in WORKLOADS if (arguments.results / f"{name}.jsonl").exists()]
    timeout_s = parse_seconds(arguments.timeout)
    with WorkerPool() as pool:
        machine = ask_machine(pool)
        entries = []
        for name in names:
            address, shape = WORKLOADS[name]
            label = ",".join(f"{key}={value}" for key, value in shape.items())
            sampling_s = parse_seconds(arguments.sampling)
            settings = Settings(address, shapes={label: shape}, timeout_s=timeout_s, sampling_s=sampling_s)
            found = load_measurements(arguments.results / f"{name}.jsonl")[-1].plan
            entries.append(Entry(name, found, *prepare_trials(pool, settings, machine)))
        try:
            until_s = time.monotonic() + parse_seconds(arguments.set_up_for)
            set_up(pool, entries, arguments.at_once, arguments.searches, until_s)
            behind = [
                entry.name
                for entry in entries
                if not race(entry, RunLog(entry.spec, machine, entry.facts, arguments.out))
            ]
        finally:
            close(*(arm for entry in entries for arm in entry.arms))
    if behind:
        print(f"behind torch.compile: {', '.join(behind)}", file=sys.stderr)
    return 1 if behind else 0


def set_up(pool: WorkerPool, entries: Sequence[Entry], at_once: int, searches: int, until_s: float) -> None:
    """Sets all plans up; autotuning runs in its own pool, because it takes minutes and times kernels on the GPU."""

    def open_one(job: tuple[Entry, Plan]) -> None:
        entry, plan = job
        started = time.monotonic()
        spec = replace(entry.spec, timeout_s=min(entry.spec.timeout_s, until_s - started))
        try:
            if spec.timeout_s <= 0:
                raise WorkerFailed("timeout", "not set up: the time for it was over")
            arm = open_arm(pool, spec, plan, FRESH_SEEDS)
            measure_peak(arm, spec)
        except WorkerFailed as failure:
            entry.failures[str(plan)] = str(failure)
        else:
            arm.notes += ("set up beside other plans",)
            entry.arms.append(arm)
        said = f"{time.monotonic() - started:.0f} s {entry.failures.get(str(plan), '')}"
        print(f"{entry.name}: {plan}: {said}", flush=True)

    jobs = [(entry, plan) for entry in entries for plan in entry.plans]
    with ThreadPoolExecutor(searches) as slow, ThreadPoolExecutor(at_once) as quick:
        waiting = [(slow if "max-autotune" in str(job[1]) else quick).submit(open_one, job) for job in jobs]
        for one in waiting:
            one.result()


def race(entry: Entry, log: RunLog) -> bool:
    """Writes a row per plan; returns False if a mode of torch.compile or eager bf16 is significantly faster."""
    for plan, reason in entry.failures.items():
        log.record(log.row("bench", Plan.parse(plan), "failed", reason))
    arms = [arm for arm in entry.arms if arm.passed]
    for arm in entry.arms:
        if not arm.passed:
            red = next(score for score in arm.scores if not score.passed)
            log.record(log.row("bench", arm.plan, "refused", f"outside the gate: {red}", arm))
    # Measures the step times again, because the first estimates include the load of compilers running in parallel.
    for arm in arms:
        once = dict.fromkeys(entry.spec.shapes, 1)
        arm.step_s = arm.worker.ask("sample", entry.spec.timeout_s, steps=once, warm=once)
    taken = take_turns(arms, entry.spec, sampling_s=2 * entry.spec.sampling_s)
    label = next(iter(entry.spec.shapes))
    ahead = True
    ours = next((samples for arm, samples in zip(arms, taken, strict=True) if str(arm.plan) == entry.found), None)
    for arm, samples in zip(arms, taken, strict=True):
        log.record(log.row("bench", arm.plan, "baseline", "measured", arm, samples))
        said = ""
        if ours is not None and samples is not ours:
            ratio = compare(samples, ours)
            said = f", the found plan is {ratio.low:.2f}–{ratio.high:.2f}× as fast"
            ahead = ahead and not ratio.below(1.0)
        print(f"{entry.name}: {arm.plan}: {format_seconds(median(samples[label]))}{said}", flush=True)
    close(*entry.arms)
    entry.arms.clear()
    return ahead and ours is not None


if __name__ == "__main__":
    sys.exit(main())
