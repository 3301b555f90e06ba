"""The climb: tries optimizations of a workload, and keeps those that measurably reduce its time or its memory."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from redline.errors import RedlineError
from redline.ladder.choices import CALLERS
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.objective import Objective
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung
from redline.ladder.search.climbed import Climbed
from redline.ladder.search.climber import Climber
from redline.ladder.search.output_lock import locked
from redline.ladder.search.preparation import address_of
from redline.ladder.search.progress import Progress, no_progress, print_progress
from redline.ladder.search.settings import (
    Settings,
    read_duration,
    read_max_error,
    read_rungs,
    read_size,
)
from redline.ladder.search.target import Target
from redline.ladder.shape_ranges import Shapes, read_ranges, read_shapes
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import check_file
from redline.notation import format_bytes


def climb(
    workload: str | Workload,
    *,
    budget: str | float | None = None,
    objective: str = "latency",
    callers: int = CALLERS,
    max_memory: str | int | None = None,
    max_error: float | None = None,
    target: str | None = None,
    rungs: Sequence[Rung | str] = (),
    without: Sequence[Rung | str] = (),
    shapes: Shapes | None = None,
    device: str = "auto",
    reference: str = "fp32",
    timeout: str | float = "5m",
    sampling: str | float = "6s",
    ablation: bool = True,
    resume: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = print_progress,
) -> Climbed:
    """Tries optimizations one at a time, measures and judges each, and returns the best plan.

    Args:
        workload: A `Workload`, or the address of a function that returns one (`module:function`, `file.py:function`,
            `train:CONFIG` or a bundled name). A `Workload` is sent to the trial processes with cloudpickle.
        budget: Time for the whole climb with its final race, such as `"10m"` or a number of seconds. A trial that
            cannot end within this time is not started.
        objective: `"latency"` (the time of one step), `"p99"` (the 99th percentile of the times of single calls, of at
            least 1000 calls of each plan), `"throughput"` (the time of many steps in a row), `"requests"` (the calls
            per second of concurrent callers) or `"memory"` (the peak).
        callers: The number of concurrent callers of the objective `"requests"`: threads, on CUDA with a stream each.
        max_memory: The largest peak that the answer may have, such as `"8GiB"` or a number of bytes. A plan above it is
            dropped. If even the best plan is above it, the climb writes its report and raises RedlineError.
        max_error: The largest score of the workload's first gate that measures an error, such as 0.005. A plan above
            it is refused. The gate's own limit holds too.
        target: A time per step (`"16ms"`) or a peak size (`"8GiB"`); the climb stops trying when it is reached. A size
            sets the objective to memory.
        rungs: Only try these rungs, for example `["bf16", "compile(mode=max-autotune)"]`.
        without: Do not try these rungs.
        shapes: Input shapes as options of the workload's function: `[{"batch": 1}, {"batch": 8}]`. A range,
            `[{"batch": range(1, 33)}]`, is timed at both ends and between; at the end the plan tries the other
            sizes, and the result says where it sets up again, falls back or fails.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        reference: Precision of the reference outputs that the gates compare with: `"fp32"` or `"fp64"`.
        timeout: Time limit of one trial.
        sampling: Duration of the timing of one comparison (both plans together).
        ablation: Whether to measure the plan without each of its rungs at the end. Rungs without a gain are removed.
        resume: Whether to continue the climb whose measurements are in `out`.
        out: Folder for `measurements.jsonl` (written as the climb runs), `plan.toml`, `report.html`, `report.md`, and
            `front` with a plan file for each plan of the Pareto front. Nothing is written if `out` is None.
        progress: Called with each event's text and, for a measurement, with the measurement. By default a line per
            trial is printed to stderr; None prints nothing.
    """
    started_s = time.monotonic()
    if resume and not isinstance(workload, str):
        raise RedlineError("resume= needs the address of a workload, because a workload in memory has no digest.")
    aim = Target.parse(target) if target is not None else None
    settings = Settings(
        workload="",
        folder=Path(out) if out is not None else None,
        shapes=read_shapes(shapes),
        ranges=read_ranges(shapes),
        device=device,
        objective=Objective.MEMORY if aim is not None and aim.size_bytes else Objective.named(objective),
        callers=callers,
        target=aim,
        max_bytes=read_size(max_memory),
        max_error=read_max_error(max_error),
        budget_s=None if budget is None else read_duration(budget),
        only=read_rungs(rungs),
        without=read_rungs(without),
        reference=reference,
        timeout_s=read_duration(timeout),
        sampling_s=read_duration(sampling),
        ablate=ablation,
        resume=resume,
    )
    check_file(workload)
    with locked(settings.folder), WorkerPool() as pool:
        settings = replace(settings, workload=address_of(workload, pool))
        climbed = Climber(settings, pool, progress or no_progress, started_s).run()
        climbed = _write_files(climbed, settings.folder)
    if climbed.missed_limit:
        where = f" (see {climbed.files['report']})" if climbed.files else ""
        raise RedlineError(f"{climbed.missed_limit}: raise --max-memory, or try more rungs{where}.")
    return climbed


def _write_files(climbed: Climbed, folder: Path | None) -> Climbed:
    if folder is None:
        return climbed
    # Imported here, because only a climb that writes files needs the report's templates.
    from redline.ladder.report import write_report

    files = {
        "plan file": folder / "plan.toml",
        "measurements": folder / "measurements.jsonl",
        "report": folder / "report.html",
        "Markdown": folder / "report.md",
    }
    comment = {
        "workload": climbed.final.workload,
        "machine": climbed.machine.name,
        "torch": climbed.machine.versions["torch"],
        "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        "result": climbed.final.reason,
    }
    about_sizes = {"shapes": "; ".join(climbed.ranges)} if climbed.ranges else {}
    front = climbed.front
    # Removes the plan files of an earlier climb in this folder, which would look like results of this climb.
    for path in (files["plan file"], *(folder / "front").glob("*.toml")):
        path.unlink(missing_ok=True)
    for point in front:
        about = {
            **comment,
            "result": f"{point.speed} over eager, peak {format_bytes(point.peak_bytes)}, {point.quality}",
        }
        path = files[f"front {point.number}"] = folder / "front" / point.file_name
        replace(Plan.parse(point.plan), objective=climbed.plan.objective).save(path, about)
    if climbed.missed_limit:
        del files["plan file"]
    else:
        climbed.plan.save(files["plan file"], comment | about_sizes)
    write_report(climbed.measurements, files["report"], files["Markdown"])
    return replace(climbed, files=files)
