"""`redline train`: training, from a settings file to weights and a page about them.

`redline train CONFIG.toml` trains a language model; other kinds of model have a word of their own before the file.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from redline.cli.console import print_json, progress, results, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports
from redline.cli.train_lsd import train_lsd
from redline.cli.train_progress import TrainingLine, exit_interrupted, parse_minutes, print_note, resume_command
from redline.notation import format_bytes, format_megapixels, format_seconds
from redline.training.bundled import find_settings

if TYPE_CHECKING:
    from redline.training.loop import Outcome
    from redline.training.model_card import Result


class _TextUnlessNamed(TyperGroup):
    """A first word that is no command is the settings file of `text`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["text", *args]
        return super().parse_args(ctx, args)


train = typer.Typer(
    cls=_TextUnlessNamed,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@train.callback()
def _train(context: typer.Context) -> None:
    """Train a model, from a settings file to weights and a page about them.

    Example: redline train mine.toml --source corpus
    """
    context.with_resource(warnings_as_sentences())


@train.command("text")
def train_text(
    config: Annotated[str, typer.Argument(help="A settings file, or a bundled one: decoder-tiny, recall-mqar …")],
    out: Annotated[Path | None, typer.Option(help="Folder for model, page, checkpoints and journal.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="File or folder to train on, instead of the settings'; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps (overrides the settings).")] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time", help="Train for this long, for example 12m (overrides the settings).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a language model on text; Ctrl-C saves where it stands. The word "text" may be left out.

    Example: redline train text decoder-tiny --source corpus --out tiny, or in short: redline train mine.toml
    """
    with uninterrupted_imports():
        import torch

        from redline.machine.machine import resolve_device
        from redline.training.text.run import prepare_training, run_text
    path = find_settings(config, "text")
    minutes = parse_minutes(time_limit, steps)
    where = torch.device(resolve_device(device))
    folder = out or Path("redline-out") / "train" / path.stem
    with LiveLine("reading text …") as line:
        task = prepare_training(path, folder, where, resume, line.update, print_note, source, steps, minutes)
        line.update("the first steps …")
        outcome, result = run_text(task, folder, where, resume, TrainingLine(line), print_note)
    if result is None:
        given = {"--source": source or [], "--steps": [steps], "--time": [time_limit]}
        exit_interrupted(outcome, resume_command([config], given, device, folder))
    elif as_json:
        position = outcome.position
        about = {"steps": position.step, "elapsed_s": position.elapsed_s, "skipped": position.skipped}
        print_json({**asdict(result), **about, "peak_bytes": outcome.peak_bytes})
    else:
        figures = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in result.figures.items())
        skipped = f" ({outcome.position.skipped:,} of them skipped)" if outcome.position.skipped else ""
        took = format_seconds(outcome.position.elapsed_s)
        results.print(
            f"[bold]{result.model}[/]: {result.parameters:,} parameters, {outcome.position.step:,} steps{skipped} in "
            f"{took}{figures}; about it: {result.page}",
            highlight=False,
        )


@train.command("drct")
def train_drct(
    config: Annotated[str, typer.Argument(help="A settings file, or a bundled one: drct-small-x4, drct-small-x2.")],
    out: Annotated[Path | None, typer.Option(help="Folder for weights, checkpoints and journal.")] = None,
    photos: Annotated[str | None, typer.Option(help="Folder to train on, instead of the file's.")] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="Folder of a test set, instead of the file's; repeatable.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Weights of a DRCT of the same shape to begin with; of any scale.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps (overrides the settings).")] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time", help="Train for this long, for example 12m (overrides the settings).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a DRCT on the photos of a folder; Ctrl-C saves where it stands.

    Example: redline train drct drct-small-x4 --photos photos --validation Set5 --out small-x4
    """
    with uninterrupted_imports():
        import torch

        from redline.machine.machine import resolve_device
        from redline.training.loop import train as run_training
        from redline.training.model_card import write_result
        from redline.training.super_resolution import DrctTask, DrctTraining
    path = find_settings(config, "drct")
    minutes = parse_minutes(time_limit, steps)
    settings = DrctTraining.read(path, photos=photos, validation=validation, start=start, steps=steps, minutes=minutes)
    folder = out or Path("redline-out") / "train" / path.stem
    where = torch.device(resolve_device(device))
    with LiveLine("reading photos …") as line:
        task = DrctTask(settings, where)
        for sentence in task.crops.pairs.skipped:
            progress.print(f"[yellow]skipped:[/] {escape(sentence)}", highlight=False)
        said = f"{task.crops.pairs.photos} photos, {format_megapixels(task.crops.pairs.pixels)}, on {where}"
        print_note(f"{said}, {task.precision}")
        if task.start and not resume:
            print_note(f"beginning with {task.start}")
        line.update("the first steps …")
        outcome = run_training(task, settings.loop, folder, where, resume, TrainingLine(line))
        if outcome.interrupted:
            given = {"--photos": [photos], "--validation": validation or [], "--start": [start]}
            given |= {"--steps": [steps], "--time": [time_limit]}
            exit_interrupted(outcome, resume_command(["drct", config], given, device, folder))
        line.update("scoring …")
        result = write_result(task, outcome, folder)
    _print_json(outcome, result) if as_json else _print(outcome, result)


train.command("lsd")(train_lsd)


def _print(outcome: Outcome, result: Result) -> None:
    if result.scores:
        table = Table("test set", "PSNR-Y dB", "SSIM-Y", "bicubic", "", box=None, pad_edge=False)
        for folder, seen in result.scores.items():
            mean, baseline = seen.mean, result.bicubic[folder].mean
            table.add_row(
                Path(folder).name,
                f"[bold]{mean.psnr_y_db:.2f}[/]",
                f"{mean.ssim_y:.4f}",
                f"{baseline.psnr_y_db:.2f}",
                f"{mean.psnr_y_db - baseline.psnr_y_db:+.2f} dB",
            )
        results.print(table)
    took = format_seconds(outcome.position.elapsed_s)
    results.print(
        f"[bold]{result.weights}[/]: {result.parameters:,} parameters, {format_bytes(result.model_bytes)}, "
        f"{outcome.position.step:,} steps in {took}; about it: {result.card}",
        highlight=False,
    )


def _print_json(outcome: Outcome, result: Result) -> None:
    print_json(
        {
            "weights": str(result.weights),
            "card": str(result.card),
            "parameters": result.parameters,
            "model_bytes": result.model_bytes,
            "steps": outcome.position.step,
            "elapsed_s": outcome.position.elapsed_s,
            "peak_bytes": outcome.peak_bytes,
            "scores": {Path(folder).name: asdict(seen.mean) for folder, seen in result.scores.items()},
            "bicubic": {Path(folder).name: asdict(seen.mean) for folder, seen in result.bicubic.items()},
        }
    )
