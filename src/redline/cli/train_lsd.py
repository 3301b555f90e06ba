"""`redline train lsd`: a model that restores live video, from a settings file to weights and a page about them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.cli.console import print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports
from redline.cli.train_progress import TrainingLine, exit_interrupted, parse_minutes, resume_command
from redline.notation import format_bytes, format_megapixels, format_seconds
from redline.training.bundled import find_settings

if TYPE_CHECKING:
    from redline.training.loop import Outcome
    from redline.training.lsd.result import LsdResult


def train_lsd(
    config: Annotated[str, typer.Argument(help="A settings file, or a bundled one: lsd-tiny.")],
    out: Annotated[Path | None, typer.Option(help="Folder for weights, checkpoints and journal.")] = None,
    photos: Annotated[str | None, typer.Option(help="Folder to train on, instead of the file's.")] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="Folder of photos to judge by, instead of the file's; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps (overrides the settings).")] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time", help="Train for this long, for example 8m (overrides the settings).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a live video model on clips made from the photos of a folder; Ctrl-C saves where it stands.

    Example: redline train lsd lsd-tiny --photos photos --validation held-out --out tiny
    """
    with uninterrupted_imports():
        import torch

        from redline.machine.machine import resolve_device
        from redline.training.loop import train as run_training
        from redline.training.lsd.result import write_lsd_result
        from redline.training.lsd.settings import LsdTraining
        from redline.training.lsd.task import LsdTask
    path = find_settings(config, "lsd")
    minutes = parse_minutes(time_limit, steps)
    settings = LsdTraining.read(path, photos=photos, validation=validation, steps=steps, minutes=minutes)
    folder = out or Path("redline-out") / "train" / path.stem
    where = torch.device(resolve_device(device))
    with LiveLine("reading photos …") as line:
        task = LsdTask(settings, where)
        pairs = task.clips.crops.pairs
        for sentence in pairs.skipped:
            progress.print(f"[yellow]skipped:[/] {escape(sentence)}", highlight=False)
        said = f"{pairs.photos} photos, {format_megapixels(pairs.pixels)}, on {where}, {task.precision}"
        progress.print(f"[dim]{escape(said)}[/]", highlight=False)
        line.update("the first steps …")
        outcome = run_training(task, settings.loop, folder, where, resume, TrainingLine(line))
        if outcome.interrupted:
            given = {"--photos": [photos], "--validation": validation or [], "--steps": [steps], "--time": [time_limit]}
            exit_interrupted(outcome, resume_command(["lsd", config], given, device, folder))
        line.update("judging …")
        result = write_lsd_result(task, outcome, folder)
    _print_json(outcome, result) if as_json else _print(outcome, result)


def _print(outcome: Outcome, result: LsdResult) -> None:
    if result.scores:
        table = Table(
            "test set", "PSNR dB", "input", "warp error", "frame by frame", "drift dB", box=None, pad_edge=False
        )
        for name, seen in result.scores.items():
            table.add_row(
                name,
                f"[bold]{seen.psnr_db:.2f}[/]",
                f"{seen.input_psnr_db:.2f}",
                f"[bold]{seen.warp_error:.5f}[/]",
                f"{seen.alone_warp_error:.5f}",
                f"{seen.drift_db:+.2f}",
            )
        results.print(table)
    took = format_seconds(outcome.position.elapsed_s)
    results.print(
        f"[bold]{result.weights}[/]: {result.parameters:,} parameters, {format_bytes(result.model_bytes)}, "
        f"{outcome.position.step:,} steps in {took}, up to {result.stage}; about it: {result.card}",
        highlight=False,
    )


def _print_json(outcome: Outcome, result: LsdResult) -> None:
    print_json(
        {
            "weights": str(result.weights),
            "card": str(result.card),
            "parameters": result.parameters,
            "model_bytes": result.model_bytes,
            "stage": result.stage,
            "steps": outcome.position.step,
            "elapsed_s": outcome.position.elapsed_s,
            "peak_bytes": outcome.peak_bytes,
            "scores": {name: asdict(seen) for name, seen in result.scores.items()},
        }
    )
