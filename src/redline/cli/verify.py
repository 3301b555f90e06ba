"""`redline verify`: checks whether a plan still holds on this machine."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from redline.choices import CALLERS
from redline.cli.console import NO, YES, plain_table, print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.options import PLAN_HELP, AsJson, Callers, Device, Sampling, Shapes, Timeout, Workload, parse_shapes
from redline.cli.signals import uninterrupted_imports
from redline.notation import format_bytes, format_seconds


def verify(
    plan: Annotated[str, Argument(help=PLAN_HELP)],
    workload: Workload,
    shapes: Shapes = None,
    device: Device = "auto",
    objective: Annotated[
        str | None,
        Option(help="latency, p99, throughput, requests or memory (default: the objective in the plan, else latency)."),
    ] = None,
    callers: Callers = CALLERS,
    timeout: Timeout = "5m",
    sampling: Sampling = "6s",
    as_json: AsJson = False,
) -> None:
    """Measure a plan again on this machine; exit code 1 if a rung fails or no longer gains anything.

    Example: redline verify redline-out/resnet/plan.toml resnet
    """
    with uninterrupted_imports():
        from redline import verify as verify_plan
    with LiveLine("starting …") as line:
        seen = verify_plan(
            plan,
            workload,
            objective=objective,
            callers=callers,
            shapes=parse_shapes(shapes),
            device=device,
            timeout=timeout,
            sampling=sampling,
            progress=lambda text, _: line.update(f"{text} …"),
        )
    if as_json:
        print_json({**asdict(seen), "plan": str(seen.plan), "machine": seen.machine.as_dict()})
    else:
        table = plain_table("rung", "holds", "reason")
        for row in seen.rungs:
            table.add_row(row.rung, YES if row.holds else NO, escape(row.reason))
        results.print(f"[bold]{escape(str(seen.plan))}[/] on {seen.machine.name}, judged by {seen.objective}")
        results.print(table)
        if seen.speedup is not None:
            results.print(
                f"{seen.speedup} over eager, "
                f"{format_seconds(seen.median_s)} a step, {format_bytes(seen.peak_bytes)} at the peak "
                f"(eager {format_bytes(seen.eager_peak_bytes)})"
            )
        for score in seen.scores:
            results.print(score)
        for sentence in seen.ranges:
            results.print(escape(sentence))
        verdict = "[bold green]holds[/]" if seen.holds else "[bold red]does not hold[/]"
        results.print(f"{verdict}: {escape(seen.reason)}")
    raise typer.Exit(0 if seen.holds else 1)
