"""`redline eval drift`: whether a live model stays what it is over a thousand frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.plans import PLAN_HELP, read_plan
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.stream.metrics_file import check_output_path
from redline.stream.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from redline.evaluation.drift import Case, CaseRun, Finding
    from redline.evaluation.drift.case_run import NewModel
    from redline.evaluation.drift.controls import Make
    from redline.stream.frame_model import FrameModel


def evaluate_drift(
    model: Annotated[
        Path, typer.Argument(help="An LSD's weights, the folder of its training, or that of a diffusers pipeline.")
    ],
    clip: Annotated[Path, typer.Argument(help="A folder of photos, over which a camera is moved; or a film.")],
    frames: Annotated[int, typer.Option(help="Frames of each case.")] = 1000,
    size: Annotated[int, typer.Option(help="Pixels a side of clips made from photos.")] = 256,
    steps: Annotated[int | None, typer.Option(help="Sampling steps a frame; default: the model's own.")] = None,
    sampler: Annotated[str | None, typer.Option(help="distilled, ddim, dpm_solver or flow_euler.")] = None,
    strength: Annotated[float | None, typer.Option(help="0 to 1; default: the model's own.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same clips and noise.")] = 0,
    plan: Annotated[str, typer.Option(help=PLAN_HELP)] = "eager",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    controls: Annotated[bool, typer.Option(help="Show that constant, noise and identity fail.")] = True,
    page: Annotated[Path | None, typer.Option(help="Write a page with the curves here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures of every frame here, as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Watch a live model over a thousand frames: colours, contrast, detail, structure, flicker, and its reactions.

    Photos make three cases whose motion is known to the pixel: a moving camera, one that stands still, and a hard cut.
    Exit code 1 when something does not hold.

    Example: redline eval drift lsd-tiny.safetensors photos --page drift.html
    """
    with uninterrupted_imports():
        import torch

        from redline.evaluation.drift import judge, run_case
        from redline.evaluation.drift.case_run import LEAST_FRAMES, check_frames
        from redline.evaluation.drift.page import render_page
        from redline.machine.machine import resolve_device
        from redline.stream.loading import load_model
    check_frames(frames)
    if size < 1:
        raise RedlineError(f"a clip has at least one pixel a side, not {size}.")
    read = {"model": model, "clip": clip}
    if page is not None:
        check_output_path(page, read)
    if out is not None:
        check_output_path(out, {**read, "page": page})
    where = torch.device(resolve_device(device))
    loaded = load_model(model, read_plan(plan), where, sampler)
    running = loaded.frames
    chosen = loaded.strength if strength is None else strength
    settings = Settings(chosen, loaded.steps if steps is None else steps, seed)
    running.check(settings)
    cases = _cases(clip, frames, size, running, seed)
    with LiveLine("setting up …") as line:
        watched = [
            run_case(_beginner(running, settings, case), case, _told(line, case.name, case.frames)) for case in cases
        ]
        # Whole cases of their own, the cut in the middle: the beginning of a long one would be no case at all.
        refused = _watch_controls(_cases(clip, LEAST_FRAMES, size, running, seed), line) if controls else {}
    findings = [finding for one in watched for finding in judge(one)]
    if out is not None:
        write_text(out, "".join(_line(one, index, row) for one in watched for index, row in enumerate(one.rows)))
    if page is not None:
        counted = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
        about = f"{running.name} · {sampler or 'its own sampler'}, {counted} · plan {loaded.plan} · {where}"
        write_text(page, render_page(model.name, f"{about} · {clip.name}", watched, findings, refused))
        progress.print(f"wrote {escape(str(page))}", highlight=False, soft_wrap=True)
    passed = [name for name, found in refused.items() if all(finding.holds for finding in found)]
    if as_json:
        data = {"model": str(model), "clip": str(clip), "steps": settings.steps, "plan": str(loaded.plan)}
        data["findings"] = [asdict(finding) for finding in findings]
        print_json({**data, "controls_that_passed": passed})
    else:
        _print(findings, list(refused), passed)
    raise typer.Exit(0 if all(finding.holds for finding in findings) and not passed else 1)


def _cases(clip: Path, frames: int, size: int, running: FrameModel, seed: int) -> list[Case]:
    from redline.evaluation.drift import photo_cases, video_case
    from redline.stream.sources.video_file import VideoFile

    if clip.is_dir():
        return photo_cases(str(clip), frames, running.padded_px(size), running.device, seed)
    film = VideoFile(clip)
    try:
        # What the model would have to be padded for is cut off.
        height, width = (_fitting(side, running) for side in (film.height, film.width))
    finally:
        film.close()

    def pictures() -> Iterator[Tensor]:
        source = VideoFile(clip)
        try:
            for frame in islice(source.frames(), frames):
                yield frame.pixels[:height, :width].to(running.device)
        finally:
            source.close()

    return [video_case(clip.name, pictures, frames)]


def _fitting(side_px: int, running: FrameModel) -> int:
    fitting = next((side for side in range(side_px, 0, -1) if running.padded_px(side) == side), None)
    if fitting is None:
        raise RedlineError(f"a picture of {side_px} pixels a side is too small for {running.name}.")
    return fitting


def _beginner(running: FrameModel, settings: Settings, case: Case) -> NewModel:
    """Exactly what the stream's engine computes for a frame; of what it saw it keeps nothing but its last output."""
    height, width = next(iter(case.moments())).seen.shape[-2:]
    program = running.program(settings.steps, height, width)
    program.retune(settings)

    def make(frame: Tensor, previous: Tensor) -> Tensor:
        return (program.run(frame * 2 - 1, previous * 2 - 1).clamp(-1, 1) + 1) / 2

    return lambda: make


def _watch_controls(cases: list[Case], line: LiveLine) -> dict[str, list[Finding]]:
    from redline.evaluation.drift import CONTROLS, judge, run_case

    def refuse(name: str, make: Make) -> list[Finding]:
        told = {case.name: _told(line, f"{name}, {case.name}", case.frames) for case in cases}
        return [finding for case in cases for finding in judge(run_case(lambda: make, case, told[case.name]))]

    return {name: refuse(name, make) for name, make in CONTROLS.items()}


def _told(line: LiveLine, name: str, frames: int) -> Callable[[int], None]:
    return lambda frame: line.count(name, frame, frames, "frame")


def _line(watched: CaseRun, index: int, row: dict[str, float]) -> str:
    figures = {name: value for name, value in row.items() if value == value}
    return json.dumps({"case": watched.case, "frame": index, **figures}) + "\n"


def _print(findings: list[Finding], controls: list[str], passed: list[str]) -> None:
    from redline.evaluation.drift.page import headline

    table = Table("case", "finding", "holds", "seen", box=None, header_style="bold", pad_edge=False)
    for finding in findings:
        holds = "[green]yes[/]" if finding.holds else "[red]no[/]"
        table.add_row(finding.case, finding.name, holds, escape(finding.sentence))
    results.print(table)
    if passed:
        results.print(f"[bold red]this report means nothing[/]: {', '.join(passed)} passed it")
    elif controls:
        results.print(f"[dim]refused, as they must be: {', '.join(controls)}[/]")
    steady = all(finding.holds for finding in findings)
    results.print(f"{'[bold green]steady[/]' if steady else '[bold red]not steady[/]'}: {escape(headline(findings))}")
