"""`redline eval drift`: measures whether a live model stays stable over a thousand frames."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.plans import PLAN_HELP, read_plan
from redline.cli.signals import uninterrupted_imports
from redline.stream.metrics_file import check_output_path

if TYPE_CHECKING:
    from redline.stream.drift import DriftResult


def evaluate_drift(
    model: Annotated[
        Path, typer.Argument(help="LSD weights, the output folder of their training, or a diffusers folder.")
    ],
    clip: Annotated[Path, typer.Argument(help="A video, or a folder of photos, over which a camera is moved.")],
    frames: Annotated[int, typer.Option(help="Frames of each case.")] = 1000,
    size: Annotated[int, typer.Option(help="Side of clips made from photos, in pixels.")] = 256,
    steps: Annotated[int | None, typer.Option(help="Sampling steps per frame (default: the model's).")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="distilled, ddim, dpm_solver or flow_euler (default: distilled).")
    ] = None,
    strength: Annotated[float | None, typer.Option(help="0 to 1 (default: the model's).")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same clips and noise.")] = 0,
    plan: Annotated[str, typer.Option(help=PLAN_HELP)] = "eager",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    controls: Annotated[bool, typer.Option(help="Check that constant, noise and identity fail.")] = True,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with curves.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the metrics of every frame as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a live model over a thousand frames: colours, contrast, detail, structure, flicker, and response.

    Photos make three cases whose motion is known exactly: a moving camera, a still one, and a hard cut.
    The exit code is 1 if a finding does not hold.

    Example: redline eval drift lsd-tiny.safetensors photos --page drift.html
    """
    with uninterrupted_imports():
        from redline.stream import drift
    others = {"model": model, "clip": clip}
    if page is not None:
        check_output_path(page, others)
    if out is not None:
        check_output_path(out, {**others, "page": page})
    with LiveLine("setting up …") as line:
        result = drift.evaluate_drift(
            model,
            clip,
            frames=frames,
            size=size,
            steps=steps,
            sampler=sampler,
            strength=strength,
            seed=seed,
            plan=read_plan(plan),
            device=device,
            controls=controls,
            progress=lambda name, frame, total: line.count(name, frame, total, "frame"),
        )
    if out is not None:
        result.write_rows(out)
    if page is not None:
        result.write_page(page)
        progress.print(f"wrote {escape(str(page))}", highlight=False, soft_wrap=True)
    if as_json:
        data = {"model": str(model), "clip": str(clip), "steps": result.steps, "plan": str(result.plan)}
        data["findings"] = [asdict(finding) for finding in result.findings]
        print_json({**data, "controls_that_passed": result.controls_that_passed})
    else:
        _print(result)
    raise typer.Exit(0 if result.is_stable and not result.controls_that_passed else 1)


def _print(result: DriftResult) -> None:
    from redline.evaluation.drift.page import headline

    table = Table("case", "finding", "holds", "measured", box=None, header_style="bold", pad_edge=False)
    for finding in result.findings:
        holds = "[green]yes[/]" if finding.holds else "[red]no[/]"
        table.add_row(finding.case, finding.name, holds, escape(finding.sentence))
    results.print(table)
    if passed := result.controls_that_passed:
        results.print(f"[bold red]this evaluation is meaningless[/]: the controls {', '.join(passed)} passed it")
    elif result.controls:
        results.print(f"[dim]the controls failed, as they must: {', '.join(result.controls)}[/]")
    verdict = "[bold green]stable[/]" if result.is_stable else "[bold red]not stable[/]"
    results.print(f"{verdict}. {escape(headline(result.findings))}")
