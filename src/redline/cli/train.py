"""`redline train`: trains a model from a config, shows its progress, and prints its scores.

`redline train CONFIG` trains a language model; other kinds of model have their own subcommand.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option
from typer.core import TyperGroup

from redline.cli import LOOK
from redline.cli.console import note, plain_table, print_json, progress, results, warnings_as_sentences
from redline.cli.live_line import LiveLine
from redline.cli.options import AsJson, Device
from redline.cli.signals import TERMINATED, uninterrupted_imports
from redline.notation import format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.training.loop import Progress
    from redline.training.run import TrainingResult

# The fields of a result that describe its weight file.
_WEIGHTS = ("weights", "card", "parameters", "model_bytes")
CONFIG_HELP = "A config file, or the name of a bundled config"
Out = Annotated[Path | None, Option(help="Folder for the result, checkpoints and log.")]
Photos = Annotated[str | None, Option(help="Folder of photos to train on (overrides the config).")]
Validation = Annotated[
    list[str] | None, Option(help="Folder of held-out images to score on (overrides the config); repeatable.")
]
Resume = Annotated[bool, Option("--resume", help="Continue from the newest checkpoint in the folder.")]
Steps = Annotated[int | None, Option(help="Train for this many steps (overrides the config).")]
Time = Annotated[str | None, Option("--time", help="Train for this long, for example 12m (overrides the config).")]


class _TextByDefault(TyperGroup):
    """Runs the command `text` if the first word is a config instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["text", *args]
        return super().parse_args(ctx, args)


train = typer.Typer(**LOOK, cls=_TextByDefault, no_args_is_help=True)


@train.callback()
def _train(context: typer.Context) -> None:
    """Train a model from a config file.

    Example: redline train mine.toml --source corpus
    """
    context.with_resource(warnings_as_sentences())


@train.command("text")
def train_text(
    config: Annotated[str, Argument(help=f"{CONFIG_HELP}: decoder-tiny, recall-mqar, …")],
    out: Out = None,
    source: Annotated[
        list[str] | None, Option(help="File or folder of text to train on (overrides the config); repeatable.")
    ] = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a language model on text; Ctrl-C saves a checkpoint. The word "text" may be left out.

    Example: redline train text decoder-tiny --source corpus --out tiny, or in short: redline train mine.toml
    """
    options = {"source": source, "steps": steps, "time": time_limit}
    _print_text(_run_training("text", config, out, resume, device, options), as_json)


@train.command("drct")
def train_drct(
    config: Annotated[str, Argument(help=f"{CONFIG_HELP}: drct-small-x4, drct-small-x2.")],
    out: Out = None,
    photos: Photos = None,
    validation: Validation = None,
    start: Annotated[str | None, Option(help="Initial weights: a DRCT of the same dimensions, of any scale.")] = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a DRCT super-resolution model on a folder of photos; Ctrl-C saves a checkpoint.

    Example: redline train drct drct-small-x4 --photos photos --validation Set5 --out small-x4
    """
    options = {"photos": photos, "validation": validation, "start": start, "steps": steps, "time": time_limit}
    _print_drct(_run_training("drct", config, out, resume, device, options), as_json)


@train.command("lsd")
def train_lsd(
    config: Annotated[str, Argument(help=f"{CONFIG_HELP}: lsd-tiny.")],
    out: Out = None,
    photos: Photos = None,
    validation: Validation = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a live video model on clips made from a folder of photos; Ctrl-C saves a checkpoint.

    Example: redline train lsd lsd-tiny --photos photos --validation held-out --out tiny
    """
    options = {"photos": photos, "validation": validation, "steps": steps, "time": time_limit}
    _print_lsd(_run_training("lsd", config, out, resume, device, options), as_json)


def _run_training(
    kind: str, config: str, out: Path | None, resume: bool, device: str, options: Mapping[str, Any]
) -> TrainingResult:
    """Trains; after an interruption prints how to resume and exits. The keys of `options` are option names."""
    with uninterrupted_imports():
        from redline.training.run import train
    with LiveLine("reading the config …") as line:
        callbacks: dict[str, Any] = {"progress": TrainingLine(line), "log": note, "status": line.update}
        named = {"source" if name == "photos" else name: value for name, value in options.items()}
        result = train(config, out=out, resume=resume, device=device, kind=kind, **named, **callbacks)
        if result.interrupted:
            given = {**options, "device": None if device == "auto" else device, "out": result.folder}
            command = ["redline", "train", *([] if kind == "text" else [kind]), config, *_words(given), "--resume"]
            message = f"stopped at step {result.steps:,} and saved a checkpoint; continue with: "
            # Not wrapped, so that the command can be copied.
            progress.print(message + escape(shlex.join(command)), soft_wrap=True)
            raise typer.Exit(TERMINATED if result.stop_signal == signal.SIGTERM else 130)
    return result


def _words(given: Mapping[str, Any]) -> list[str]:
    """Returns options as words of a command line; leaves out those that were not given."""
    lists = {f"--{name}": value if isinstance(value, list) else [value] for name, value in given.items()}
    return [str(word) for option, values in lists.items() for one in values if one for word in (option, one)]


class TrainingLine:
    """Shows every log line in the live line, and prints those with new validation metrics."""

    def __init__(self, line: LiveLine) -> None:
        self._line, self._figures = line, {}

    def __call__(self, now: Progress) -> None:
        rate = f"{now.items_per_s:,.0f}" if now.items_per_s >= 1000 else f"{now.items_per_s:.4g}"
        penalties = f" with {' and '.join(now.penalties)}" if now.penalties else ""
        parts = [f"step {now.step:,}", f"loss {now.loss:.5f}{penalties}", f"{rate} {now.unit}s/s"]
        parts += [f"{now.utilization:.1%} MFU"] if now.utilization is not None else []
        parts += [f"{format_seconds(now.left_s)} left", format_bytes(now.peak_bytes)]
        parts += [f"{now.skipped} skipped"] if now.skipped else []
        parts += [f"{name} {value:.4g}" for name, value in now.figures.items()]
        text = " · ".join(parts)
        self._line.update(text)
        if now.figures != self._figures:
            note(text)
            self._figures = now.figures


def _print_text(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        _print_json(result, {**asdict(output), "skipped": result.skipped_steps}, names=())
        return
    figures = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in result.figures.items())
    skipped = f" ({result.skipped_steps:,} of them skipped)" if result.skipped_steps else ""
    results.print(
        f"[bold]{output.model}[/]: {output.parameters:,} parameters, {result.steps:,} steps{skipped} in "
        f"{format_seconds(result.elapsed_s)}{figures}; summary: {output.page}"
    )


def _print_drct(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        scores = {
            name: {Path(folder).name: asdict(found.mean) for folder, found in table.items()}
            for name, table in (("scores", output.scores), ("bicubic", output.bicubic))
        }
        _print_json(result, scores)
        return
    table = plain_table("test set", "PSNR-Y dB", "SSIM-Y", "bicubic", "")
    for folder, found in output.scores.items():
        mean, baseline = found.mean, output.bicubic[folder].mean
        scores = (f"[bold]{mean.psnr_y_db:.2f}[/]", f"{mean.ssim_y:.4f}", f"{baseline.psnr_y_db:.2f}")
        table.add_row(Path(folder).name, *scores, f"{mean.psnr_y_db - baseline.psnr_y_db:+.2f} dB")
    _print_weights(result, table)


def _print_lsd(result: TrainingResult, as_json: bool) -> None:
    output: Any = result.output
    if as_json:
        scores = {name: asdict(found) for name, found in output.scores.items()}
        _print_json(result, {"stage": output.stage, "scores": scores})
        return
    table = plain_table("test set", "PSNR dB", "input", "warp error", "frame by frame", "drift dB")
    for name, found in output.scores.items():
        psnr = (f"[bold]{found.psnr_db:.2f}[/]", f"{found.input_psnr_db:.2f}")
        warp = (f"[bold]{found.warp_error:.5f}[/]", f"{found.alone_warp_error:.5f}")
        table.add_row(name, *psnr, *warp, f"{found.drift_db:+.2f}")
    _print_weights(result, table, f", up to {output.stage}")


def _print_json(result: TrainingResult, about: Mapping[str, object], names: tuple[str, ...] = _WEIGHTS) -> None:
    output = {name: getattr(result.output, name) for name in names}
    ran = {name: getattr(result, name) for name in ("steps", "elapsed_s", "peak_bytes")}
    print_json({**output, **about, **ran})


def _print_weights(result: TrainingResult, table: Table, stage: str = "") -> None:
    output: Any = result.output
    if output.scores:
        results.print(table)
    results.print(
        f"[bold]{output.weights}[/]: {output.parameters:,} parameters, {format_bytes(output.model_bytes)}, "
        f"{result.steps:,} steps in {format_seconds(result.elapsed_s)}{stage}; model card: {output.card}"
    )
