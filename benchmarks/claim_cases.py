"""Shared by claims_cpu.py and claims_gpu.py, which measure single claims of the guides: runs cases and writes rows.

A case is a function that returns rows; each row names its case and its arm. Arms are timed in turns in one process
(A B A B), and a row keeps every turn. `points` are pairs of a size and a measured value, whose growth claims.py fits.
Each row has the machine, the versions and the command. A case that fails has a row with the reason, and rows are
written after every case, so a run that is killed keeps its measurements.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.ladder.search.run_log import command_line
from redline.machine.machine import Machine, resolve_device
from redline.machine.memory import free_cuda_caches

T = TypeVar("T")
Row = dict[str, Any]
# A turn repeats calls until it lasts this long, because shorter ones are mostly noise.
TURN_S = 0.02
_MOST_CALLS = 200


@dataclass(frozen=True)
class Bench:
    """Where and how to measure; `tiny` selects sizes that run anywhere within seconds, as a smoke test.

    A case that makes a measurement file of its own writes it to `folder`.
    """

    device: torch.device
    tiny: bool = False
    turns: int = 25
    folder: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], calls: int = 1) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return (time.perf_counter() - begun) / calls

    def turns_ms(self, arms: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Returns the milliseconds of a call for each turn; the arms take turns, and every other round is reversed."""
        calls = {}
        for name, run in arms.items():
            for _ in range(3):
                run()
            calls[name] = min(_MOST_CALLS, 1 + int(self.pick(TURN_S, 0.0) / self.seconds(run)))
        found: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(self.pick(self.turns, 2)):
            for name in list(arms)[:: 1 if turn % 2 else -1]:
                found[name].append(1e3 * self.seconds(arms[name], calls[name]))
        return found

    def timed(self, case: str, arms: Mapping[str, Callable[[], object]], **about: Any) -> list[Row]:
        """Times the arms. The row of an arm that fails has the reason, and the others are timed without it."""
        failures: dict[str, str] = {}
        for name, run in arms.items():
            try:
                self.seconds(run)
            except Exception as failure:  # noqa: BLE001 (reported in the row)
                failures[name] = f"{type(failure).__name__}: {failure}"[:300]
        turns = self.turns_ms({name: run for name, run in arms.items() if name not in failures})
        results = {name: {"failure": failures[name]} if name in failures else {"turn_ms": turns[name]} for name in arms}
        return [{"case": case, "arm": name, **about, **results[name]} for name in arms]

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Returns the most bytes that the call allocates at the same time; its result counts, its inputs do not."""
        if not self.on_gpu:
            return cpu_peak_bytes(run)
        run()
        free_cuda_caches()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = run()
        self.wait()
        del result
        return torch.cuda.max_memory_allocated(self.device) - before


def cpu_peak_bytes(run: Callable[[], object]) -> int:
    """Adds up what torch's allocator reports, because resident memory also counts pages that were freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    del result
    found = profiled.profiler
    assert found is not None and found.kineto_results is not None
    events: list[Any] = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    used = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak


def grown(case: str, arm: str, by: str, points: Sequence[tuple[float, float]], **about: Any) -> Row:
    """Returns a row of values that grow with a size."""
    return {"case": case, "arm": arm, "by": by, **about, "points": [list(point) for point in points]}


def run(cases: Mapping[str, Callable[[Bench], list[Row]]], bench: Bench, out: Path, limit_s: float) -> list[Row]:
    """Runs the cases and writes the rows so far after each. Starts no further case after `limit_s` seconds."""
    machine, begun = Machine.detect(str(bench.device)), time.perf_counter()
    about: Row = {
        "gpu": machine.name,
        **dict(machine.versions),
        "python": machine.python,
        "command": command_line(sys.argv),
    }
    if bench.tiny:
        about["tiny"] = True
    rows: list[Row] = []
    for name, case in cases.items():
        started = time.perf_counter()
        try:
            if started - begun > limit_s:
                raise RedlineError("left out: the time of --limit-s was over.")
            found = case(bench)
        except Exception as failure:  # noqa: BLE001 (reported in the row)
            found = [{"case": name, "failure": f"{type(failure).__name__}: {failure}"[:300]}]
        rows += [about | row for row in found]
        write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
        failed = [f"{row.get('arm', '')}: {row['failure']}" for row in found if "failure" in row]
        said = "; ".join(failed) or f"{len(found)} rows"
        print(f"{name}: {said} in {time.perf_counter() - started:.1f} s", flush=True)
        gc.collect()
        if bench.on_gpu:
            torch.cuda.empty_cache()
    return rows


def main(
    about: str, cases: Mapping[str, Callable[[Bench], list[Row]]], device: str, arguments: list[str] | None
) -> int:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--only", action="append", choices=list(cases), help="run only this case; repeatable")
    parser.add_argument("--limit-s", type=float, default=240.0, help="start no further case after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="run small sizes on the CPU, as a smoke test")
    asked = parser.parse_args(arguments)
    try:
        place = torch.device("cpu" if asked.tiny else resolve_device(device))
        bench = Bench(place, asked.tiny, folder=asked.out.parent)
    except RedlineError as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    chosen = {name: case for name, case in cases.items() if not asked.only or name in asked.only}
    rows = run(chosen, bench, asked.out, asked.limit_s)
    return 1 if any("failure" in row for row in rows) else 0
