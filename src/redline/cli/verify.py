"""`redline verify`: checks whether a plan still holds on this machine."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, results
from redline.cli.live_line import LiveLine
from redline.cli.plans import PLAN_HELP
from redline.cli.shapes import WORKLOAD_HELP, parse_shapes
from redline.cli.signals import uninterrupted_imports
from redline.notation import format_bytes, format_seconds


def verify(
    plan: Annotated[str, typer.Argument(help=PLAN_HELP)],
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    shapes: Annotated[
        list[str] | None, typer.Option("--shapes", help="An input shape, batch=8,size=224; repeat it.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "auto",
    objective: Annotated[
        str | None,
        typer.Option(help="latency, throughput or memory. Default: what the plan was found for, else latency."),
    ] = None,
    timeout: Annotated[str, typer.Option(help="Time limit of one trial.")] = "5m",
    sampling: Annotated[str, typer.Option(help="Time for the timed turns of one comparison.")] = "6s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Re-measure a plan here; exit code 1 when a rung no longer holds.

    Example: redline verify redline-out/resnet/plan.toml resnet
    """
    with uninterrupted_imports():
        from redline import verify as verify_plan
    with LiveLine("starting …") as line:
        seen = verify_plan(
            plan,
            workload,
            objective=objective,
            shapes=parse_shapes(shapes or []),
            device=device,
            timeout=timeout,
            sampling=sampling,
            progress=lambda text, _: line.update(f"{text} …"),
        )
    if as_json:
        print_json({**asdict(seen), "plan": str(seen.plan), "machine": seen.machine.as_dict()})
    else:
        table = Table("rung", "holds", "reason", box=None, header_style="bold", pad_edge=False)
        for row in seen.rungs:
            table.add_row(row.rung, "[green]yes[/]" if row.holds else "[red]no[/]", escape(row.reason))
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
        results.print(
            f"{'[bold green]holds[/]' if seen.holds else '[bold red]does not hold[/]'}: {escape(seen.reason)}"
        )
    raise typer.Exit(0 if seen.holds else 1)
