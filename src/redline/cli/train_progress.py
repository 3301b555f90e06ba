"""Runs a training for the command line: the progress line, and how to continue after an interruption."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from redline.cli.console import progress
from redline.cli.live_line import LiveLine
from redline.cli.signals import TERMINATED, uninterrupted_imports
from redline.notation import format_bytes, format_seconds

if TYPE_CHECKING:
    from redline.training.loop import Progress
    from redline.training.run import TrainingResult


def run_training(
    kind: str,
    config: str,
    out: Path | None,
    resume: bool,
    device: str,
    given: Mapping[str, Iterable[object]],
    **options: Any,
) -> TrainingResult:
    """Trains; after an interruption prints how to resume and exits. `given` holds the options of the command line."""
    with uninterrupted_imports():
        from redline.training.run import train
    with LiveLine("reading the config …") as line:
        callbacks: dict[str, Any] = {"progress": TrainingLine(line), "log": print_note, "status": line.update}
        result = train(config, out=out, resume=resume, device=device, kind=kind, **options, **callbacks)
        if result.interrupted:
            words = [config] if kind == "text" else [kind, config]
            _exit_interrupted(result, resume_command(words, given, device, result.folder))
    return result


def print_note(sentence: str) -> None:
    progress.print(f"[dim]{escape(sentence)}[/]", highlight=False)


def resume_command(what: list[str], given: Mapping[str, Iterable[object]], device: str, folder: Path) -> str:
    """Returns the command that continues the interrupted training with the same options."""
    given = {**given, "--device": [device if device != "auto" else None]}
    words = [str(word) for option, values in given.items() for one in values if one for word in (option, one)]
    return shlex.join(["redline", "train", *what, *words, "--out", str(folder), "--resume"])


def _exit_interrupted(result: TrainingResult, command: str) -> None:
    message = f"stopped at step {result.steps:,} and saved a checkpoint; continue with: {escape(command)}"
    # Not wrapped, so that the command can be copied.
    progress.print(message, highlight=False, soft_wrap=True)
    raise typer.Exit(TERMINATED if result.stop_signal == signal.SIGTERM else 130)


class TrainingLine:
    """Shows every log line in the live line, and prints those with new validation figures."""

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
            print_note(text)
            self._figures = now.figures
