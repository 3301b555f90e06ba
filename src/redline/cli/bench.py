"""`redline bench`: measures workloads under plans, saves the run, and compares it with an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import fail, plain_table, print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.options import (
    PLAN_HELP,
    WORKLOAD_HELP,
    AsJson,
    Callers,
    Device,
    Objective,
    Sampling,
    Shapes,
    Timeout,
    parse_shapes,
)
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.ladder.choices import BENCH_PRECISIONS, CALLERS
from redline.notation import format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.ladder.bench import Change
    from redline.ladder.measurement import Measurement

_COLOURS = {"faster": "green", "smaller": "green", "slower": "red", "larger": "red", "missing": "yellow", "same": "dim"}


def bench(
    workloads: Annotated[list[str] | None, Argument(help=f"{WORKLOAD_HELP} Default: resnet, vit and gpt.")] = None,
    plan: Annotated[list[str] | None, Option(help=f"{PLAN_HELP} Repeatable. Default: eager.")] = None,
    matrix: Annotated[
        bool, Option("--matrix", help=f"Measure every workload in every precision: {', '.join(BENCH_PRECISIONS)}.")
    ] = False,
    save_path: Annotated[Path | None, Option("--save", help="Write the run to this JSON file.")] = None,
    compare_path: Annotated[Path | None, Option("--compare", help="Compare with this earlier run.")] = None,
    any_machine: Annotated[bool, Option("--any-machine", help="Compare even when the machines differ.")] = False,
    shapes: Shapes = None,
    device: Device = "auto",
    objective: Objective = "latency",
    callers: Callers = CALLERS,
    timeout: Timeout = "5m",
    sampling: Sampling = "6s",
    as_json: AsJson = False,
) -> None:
    """Measure workloads under plans, interleaved; exit code 1 on a regression beyond the noise.

    Examples: redline bench resnet --save baseline.json; redline bench resnet --compare baseline.json;
    redline bench unet_100m unet_390m unet_880m --matrix; redline bench lsd --shapes size=heavy,side=64,steps=1

    `redline bench serve URL` measures a server of language models under load.
    """
    with uninterrupted_imports():
        from redline import bench as run_bench
        from redline.ladder.bench import BenchRun
    if workloads == ["lsd"]:
        if matrix or compare_path:
            raise RedlineError("lsd has its own matrix and cannot be compared: leave out --matrix and --compare.")
        # Imported here, because a stream needs more packages than a benchmark of workloads.
        from redline.cli.bench_lsd import bench_lsd

        bench_lsd(shapes or [], plan or [], device, save_path, as_json)
    if matrix and plan:
        raise RedlineError("--matrix has its own plans: leave out --plan or --matrix.")
    then = BenchRun.load(compare_path) if compare_path else None
    with LiveLine("starting …") as line:
        run = run_bench(
            workloads or ["resnet", "vit", "gpt"],
            BENCH_PRECISIONS if matrix else (plan or ["eager"]),
            objective=objective,
            callers=callers,
            shapes=parse_shapes(shapes),
            device=device,
            timeout=timeout,
            sampling=sampling,
            progress=lambda text, _: line.update(f"{text} …"),
        )
    # Saved before comparing, so that the measurements are kept even if the runs cannot be compared.
    if save_path:
        run.save(save_path)
    rows = run.measurements
    changes = run.compare(then, any_machine) if then is not None else []
    if as_json:
        print_json({"measurements": [asdict(row) for row in rows], "changes": [asdict(c) for c in changes]})
    else:
        _print_rows(rows)
        if compare_path:
            _print_changes(changes)
        if save_path:
            progress.print(f"saved {save_path}")
    # The matrix may contain precisions that this machine does not support, but a plan given with --plan has to run.
    broken = [row for row in rows if row.verdict in ("refused", "failed", "unavailable")] if not matrix else []
    for row in broken:
        fail(f"{row.workload} under {row.plan} was {row.verdict}: {row.reason}.")
    worse = [c for c in changes if c.verdict in ("slower", "larger", "missing")]
    raise typer.Exit(1 if worse or broken else 0)


def _print_rows(rows: Sequence[Measurement]) -> None:
    from redline.ladder.plan import brief

    eager = {(row.workload, shape): row.time_s(shape) for row in rows if row.plan == "eager" for shape in row.shapes}
    table = plain_table(
        "workload",
        "plan",
        rows[0].statistic if rows else "median",
        "99% interval",
        "× eager",
        "items/s",
        "peak",
        "quality",
    )
    for row in rows:
        if not row.samples:
            outcome = (f"[dim]{row.verdict}[/]", f"[dim]{escape(row.reason)}[/]")
            table.add_row(row.workload, escape(brief(row.plan)), *outcome)
        for shape in row.shapes:
            interval = row.time_interval_s(shape)
            base = eager.get((row.workload, shape))
            table.add_row(
                f"{row.workload} {shape}".strip(),
                escape(brief(row.plan)),
                format_seconds(interval.middle),
                f"{format_seconds(interval.low)} – {format_seconds(interval.high)}",
                f"{base / interval.middle:.2f}" if base else "",
                "" if row.is_tail else f"{row.throughput(shape):.4g} {row.unit}/s",
                format_bytes(row.peak_bytes),
                str(row.scores[0]) if row.scores else "",
            )
    results.print(table)


def _print_changes(changes: list[Change]) -> None:
    from redline.ladder.plan import brief

    table = plain_table("workload", "plan", "then", "now", "× (interval)", "peak then → now", "verdict")
    for c in changes:
        table.add_row(
            f"{c.workload} {c.shape}".strip(),
            escape(brief(c.plan)),
            format_seconds(c.then_s),
            format_seconds(c.now_s),
            f"{c.ratio.middle:.2f} ({c.ratio.low:.2f}–{c.ratio.high:.2f})",
            f"{format_bytes(c.then_bytes)} → {format_bytes(c.now_bytes)}",
            f"[{_COLOURS[c.verdict]}]{c.verdict}[/]",
        )
    results.print(table)
    for note in dict.fromkeys(f"{c.workload}: {c.note}" for c in changes if c.note):
        results.print(escape(note), soft_wrap=True)
