"""`redline climb`: tries each optimization, measures it, judges it, and keeps or drops it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from redline.cli.console import print_json, progress, results
from redline.cli.shapes import WORKLOAD_HELP, parse_shapes
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import split_outside_brackets

if TYPE_CHECKING:
    from redline.ladder.measurement import Measurement


def climb(
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    objective: Annotated[str, typer.Option(help="latency, throughput or memory.")] = "latency",
    target: Annotated[
        str | None, typer.Option(help="Stop when reached: a time per step (16ms) or a peak size (8GiB).")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the whole climb (10m). Part of it is reserved for the final race, which always finishes."
        ),
    ] = None,
    rungs: Annotated[
        list[str] | None, typer.Option(help="Only try these: 'bf16, compile(mode=max-autotune)'; repeatable.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave these out: 'int8, onnxruntime'; repeatable.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shapes", "--shape", help="An input shape, batch=8,size=224; repeat it to plan for several."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")] = "auto",
    reference: Annotated[
        str, typer.Option(help="Precision of the reference outputs that the gates compare with: fp32 or fp64.")
    ] = "fp32",
    timeout: Annotated[str, typer.Option(help="Time limit of one trial.")] = "5m",
    sampling: Annotated[str, typer.Option(help="Time for the timed turns of one comparison.")] = "6s",
    ablation: Annotated[
        bool, typer.Option("--ablation/--no-ablation", help="Remove each kept rung once at the end.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the climb in the output folder.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default: redline-out/WORKLOAD.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Make a model faster, one measured and proven rung at a time.

    Examples: redline climb resnet; redline climb model.py:workload --budget 10m --objective throughput;
    redline climb resnet --shapes batch=1 --shapes batch=8
    """
    with uninterrupted_imports():
        from redline import climb as run_climb
        from redline.cli.ladder_table import ladder_table
        from redline.ladder.report import ladder_rows
    with _shown(workload) as show:
        climbed = run_climb(
            workload,
            budget=budget,
            objective=objective,
            target=target,
            rungs=[rung for text in rungs or [] for rung in split_rungs(text)],
            without=[rung for text in without or [] for rung in split_rungs(text)],
            shapes=parse_shapes(shapes or []),
            device=device,
            reference=reference,
            timeout=timeout,
            sampling=sampling,
            ablation=ablation,
            resume=resume,
            out=out or Path("redline-out") / _folder_name(workload),
            progress=show,
        )
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
                "rows": [asdict(row) for row in ladder_rows(climbed.measurements)],
                "measurements": [asdict(m) for m in climbed.measurements],
                "files": {name: str(path) for name, path in climbed.files.items()},
            }
        )
        return
    results.print(ladder_table(climbed.measurements, results.width))
    results.print(f"\n[bold]plan[/]  {escape(str(climbed.plan))}", highlight=False, soft_wrap=True)
    for note in climbed.final.notes:
        results.print(f"[bold]note[/]  {escape(note)}", highlight=False, soft_wrap=True)
    if climbed.resumed:
        results.print(f"[bold]resume[/]  {escape(climbed.resumed)}", highlight=False, soft_wrap=True)
    if climbed.target:
        colour = "red" if climbed.missed_target else "green"
        results.print(f"[bold]target[/]  [{colour}]{escape(climbed.target)}[/]", highlight=False, soft_wrap=True)
    for name, path in climbed.files.items():
        results.print(f"[bold]{name}[/]  {path}", highlight=False, soft_wrap=True)


def split_rungs(text: str) -> tuple[str, ...]:
    """`bf16, compile(mode=default, fullgraph=true)` -> its two rungs; plus signs separate too."""
    parts = [part.strip() for part in split_outside_brackets(text, ",+")]
    if not all(parts):
        raise RedlineError(f"{text!r} has a rung without a name: write 'bf16, compile'.")
    return tuple(parts)


def _folder_name(workload: str) -> str:
    return workload.replace("/", "-").replace(":", "-").replace(".py", "").strip("-.")


@contextlib.contextmanager
def _shown(workload: str) -> Iterator[Callable[[str, Measurement | None], None]]:
    """Shows progress on stderr: a live table on a terminal, otherwise a line per event."""
    from redline.cli.ladder_table import ladder_table

    rows: list[Measurement] = []
    if not sys.stderr.isatty():

        def tell(text: str, row: Measurement | None) -> None:
            progress.print(
                f"{text}{f' ({row.reason})' if row else ' …'}", highlight=False, markup=False, soft_wrap=True
            )

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
            live.update(Group(ladder_table(tried, progress.width, workload), spinner) if tried else spinner)

        yield show
