"""`redline climb`: tries each optimization, measures it, judges it, and keeps or drops it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from typer import Option

from redline.choices import CALLERS
from redline.cli.console import print_json, progress, results
from redline.cli.options import AsJson, Callers, Device, Objective, Sampling, Shapes, Timeout, Workload, parse_shapes
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import split_outside_brackets

if TYPE_CHECKING:
    from redline.ladder.measurement import Measurement


def climb(
    workload: Workload,
    objective: Objective = "latency",
    callers: Callers = CALLERS,
    max_memory: Annotated[
        str | None, Option(help="The largest peak memory that the answer may have (8GiB); larger plans are dropped.")
    ] = None,
    max_error: Annotated[
        float | None,
        Option(help="The largest error that the answer may have (0.005), by the first gate that measures an error."),
    ] = None,
    target: Annotated[
        str | None, Option(help="Stop trying rungs when this time per step (16ms) or peak memory (8GiB) is reached.")
    ] = None,
    budget: Annotated[
        str | None,
        Option(help="Time limit of the climb (10m). Part of it is reserved for the final race, which always finishes."),
    ] = None,
    rungs: Annotated[list[str] | None, Option(help="Rungs to try, for example 'bf16, compile'; repeatable.")] = None,
    without: Annotated[
        list[str] | None, Option(help="Rungs to leave out, for example 'int8, onnxruntime'; repeatable.")
    ] = None,
    shapes: Shapes = None,
    device: Device = "auto",
    reference: Annotated[str, Option(help="Precision of the outputs that gates compare with: fp32, fp64.")] = "fp32",
    timeout: Timeout = "5m",
    sampling: Sampling = "6s",
    ablation: Annotated[
        bool, Option("--ablation/--no-ablation", help="At the end, measure the plan without each of its rungs.")
    ] = True,
    resume: Annotated[bool, Option("--resume", help="Continue the climb in the output folder.")] = False,
    out: Annotated[Path | None, Option("--out", "-o", help="Output folder. Default: redline-out/WORKLOAD.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model faster, one measured and proven rung at a time.

    Examples: redline climb resnet; redline climb model.py:workload --budget 10m --objective throughput;
    redline climb resnet --shapes batch=1 --shapes batch=8; redline climb resnet --shapes batch=1..32;
    redline climb resnet --objective requests --callers 8 --max-memory 500MB --max-error 0.005

    The answer is one plan. The Pareto front, at the end of the table, lists the other plans that are best in speed,
    memory or quality, and OUT/front has a plan file for each.
    """
    with uninterrupted_imports():
        from redline import climb as run_climb
        from redline.cli.ladder_table import climb_tables, pareto_front_table
        from redline.ladder.report import ladder_rows
    folder = workload.replace("/", "-").replace(":", "-").replace(".py", "").strip("-.")
    with _shown(workload) as show:
        climbed = run_climb(
            workload,
            budget=budget,
            objective=objective,
            callers=callers,
            max_memory=max_memory,
            max_error=max_error,
            target=target,
            rungs=[rung for text in rungs or [] for rung in split_rungs(text)],
            without=[rung for text in without or [] for rung in split_rungs(text)],
            shapes=parse_shapes(shapes),
            device=device,
            reference=reference,
            timeout=timeout,
            sampling=sampling,
            ablation=ablation,
            resume=resume,
            out=out or Path("redline-out") / folder,
            progress=show,
        )
    front = climbed.front
    if as_json:
        reached = {"asked": target, "reached": not climbed.missed_target, "sentence": climbed.target}
        print_json(
            {
                "plan": str(climbed.plan),
                "objective": climbed.plan.objective,
                "target": reached if target is not None else None,
                "resumed": climbed.resumed or None,
                "machine": climbed.machine.as_dict(),
                "final": asdict(climbed.final),
                "front": [{**asdict(point), "file": str(climbed.files[f"front {point.number}"])} for point in front],
                "rows": [asdict(row) for row in ladder_rows(climbed.measurements)],
                "measurements": [asdict(m) for m in climbed.measurements],
                "files": {name: str(path) for name, path in climbed.files.items()},
            }
        )
        return
    results.print(climb_tables(climbed.measurements, results.width))
    if front:
        results.print("", pareto_front_table(climbed.measurements, results.width), sep="\n")
    lines = [("\nplan", escape(str(climbed.plan))), *(("note", escape(text)) for text in climbed.final.notes)]
    lines += [("shapes", escape(sentence)) for sentence in climbed.ranges]
    if climbed.resumed:
        lines.append(("resume", escape(climbed.resumed)))
    if climbed.target:
        lines.append(("target", f"[{'red' if climbed.missed_target else 'green'}]{escape(climbed.target)}[/]"))
    for name, text in (*lines, *climbed.files.items()):
        results.print(f"[bold]{name}[/]  {text}", soft_wrap=True)


def split_rungs(text: str) -> tuple[str, ...]:
    """Splits `bf16, compile(mode=default, fullgraph=true)` into two rungs, at commas or plus signs."""
    parts = [part.strip() for part in split_outside_brackets(text, ",+")]
    if not all(parts):
        raise RedlineError(f"{text!r} has a rung without a name: write 'bf16, compile'.")
    return tuple(parts)


@contextlib.contextmanager
def _shown(workload: str) -> Iterator[Callable[[str, Measurement | None], None]]:
    """Shows progress on stderr: a live table on a terminal, otherwise a line per event."""
    from redline.cli.ladder_table import climb_tables

    rows: list[Measurement] = []
    if not sys.stderr.isatty():

        def tell(text: str, row: Measurement | None) -> None:
            progress.print(f"{text}{f' ({row.reason})' if row else ' …'}", markup=False, soft_wrap=True)

        yield tell
        return
    spinner = Spinner("dots", text="starting …")
    with Live(spinner, console=progress, refresh_per_second=8, transient=True) as live:

        def show(text: str, row: Measurement | None) -> None:
            if row is not None:
                rows.append(row)
            else:
                spinner.update(text=f"{escape(text)} …")
            tried = [r for r in rows if r.verdict not in ("unavailable", "unmeasured")]
            live.update(Group(climb_tables(tried, progress.width, workload), spinner) if tried else spinner)

        yield show
