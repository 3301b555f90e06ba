"""`redline batch-size`: finds the largest batch size that fits in memory, and the fastest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from redline.cli.console import note, plain_table, print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import WORKLOAD_HELP, AsJson, Device, WorkloadOptions, parse_workload_options
from redline.cli.signals import uninterrupted_imports
from redline.notation import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from redline.ladder.batch_size import BatchSizeResult, Probe

_STOPPED_BY = {
    "memory": "the next larger batch does not fit",
    "max_batch": "the search stopped at --max-batch, so larger batches may fit",
    "time": "the next larger batch took longer than --limit",
}


def batch_size(
    workload: Annotated[str, Argument(help=f"{WORKLOAD_HELP} It must have an option `batch`.")],
    target_utilization: Annotated[float, Option(help="Maximum share of the memory to use.")] = 0.85,
    memory: Annotated[
        str | None, Option(help="Device memory to assume, for example 6GiB (default: all of it).")
    ] = None,
    max_batch: Annotated[int, Option(help="Largest batch size to try.")] = 4096,
    start: Annotated[int, Option(help="First batch size to try.")] = 1,
    shape: WorkloadOptions = None,
    device: Device = "auto",
    limit: Annotated[str, Option(help="Time limit for each batch size.")] = "5m",
    as_json: AsJson = False,
) -> None:
    """Find the largest batch size that fits in memory: double it until a step does not fit, then bisect.

    Example: redline batch-size mine.py:training --target-utilization 0.85 --memory 6GiB
    """
    with uninterrupted_imports():
        from redline import find_optimal_batch_size
    with LiveLine(f"trying batch size {start} …") as line:

        def report(probe: Probe) -> None:
            note(f"batch {probe.batch}: {'fits' if probe.fits else probe.reason}")
            line.update(f"{probe.batch} {'fits' if probe.fits else 'does not fit'}, trying another …")

        found = find_optimal_batch_size(
            workload,
            options=parse_workload_options(shape),
            starting_batch_size=start,
            target_utilization=target_utilization,
            max_batch=max_batch,
            device=device,
            memory_bytes=parse_bytes(memory) if memory else None,
            probe_limit_s=parse_seconds(limit),
            on_probe=report,
        )
    if as_json:
        print_json({**asdict(found), "fastest": asdict(found.fastest)})
    else:
        _print(found)


def _print(found: BatchSizeResult) -> None:
    table = plain_table("batch", "peak", "of the budget", "step", f"{found.unit}s/s", "")
    for probe in sorted(found.tried, key=lambda p: p.batch):
        notes = [probe.reason] if probe.reason else []
        notes += ["[green]largest[/]"] if probe.batch == found.batch else []
        notes += ["[bold]fastest[/]"] if probe is found.fastest else []
        peak, seconds, rate = probe.peak_bytes, probe.seconds, probe.items_per_s
        memory = ("", "") if peak is None else (format_bytes(peak), f"{peak / found.budget_bytes:.0%}")
        speed = ("" if seconds is None else format_seconds(seconds), "" if rate is None else f"{rate:,.4g}")
        table.add_row(str(probe.batch), *memory, *speed, ", ".join(notes))
    results.print(table)
    peak, budget = format_bytes(found.peak_bytes), format_bytes(found.budget_bytes)
    results.print(f"[bold]batch {found.batch}[/] takes {peak} of {budget}; {_STOPPED_BY[found.stopped_by]}")
    if found.fastest.batch != found.batch:
        results.print(f"batch {found.fastest.batch} had the most {found.unit}s per second in a short measurement")
