"""What the training commands share: how long to train, the progress line, and how to go on after an interruption."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from redline.cli.console import progress
from redline.cli.live_line import LiveLine
from redline.cli.signals import TERMINATED
from redline.errors import RedlineError
from redline.notation import format_bytes, format_seconds, parse_seconds

if TYPE_CHECKING:
    from redline.training.loop import Outcome, Progress


def parse_minutes(time_limit: str | None, steps: int | None) -> float | None:
    if time_limit is not None and steps is not None:
        raise RedlineError("--steps and --time both say how long to train: give one of them.")
    return None if time_limit is None else parse_seconds(time_limit) / 60


def print_note(sentence: str) -> None:
    progress.print(f"[dim]{escape(sentence)}[/]", highlight=False)


def resume_command(what: list[str], given: Mapping[str, Iterable[object]], device: str, folder: Path) -> str:
    """The command that goes on where this one stopped, with all that was said to it."""
    given = {**given, "--device": [device if device != "auto" else None]}
    words = [str(word) for option, values in given.items() for one in values if one for word in (option, one)]
    return shlex.join(["redline", "train", *what, *words, "--out", str(folder), "--resume"])


def exit_interrupted(outcome: Outcome, again: str) -> None:
    step = outcome.position.step
    # Not folded, so that the command can be copied.
    progress.print(f"stopped at step {step:,} and saved; go on with: {escape(again)}", highlight=False, soft_wrap=True)
    raise typer.Exit(TERMINATED if outcome.stop_signal == signal.SIGTERM else 130)


class TrainingLine:
    """Shows each step in the live line, and prints a line that stays for every new score."""

    def __init__(self, line: LiveLine) -> None:
        self._line, self._figures = line, {}

    def __call__(self, seen: Progress) -> None:
        rate = f"{seen.items_per_s:,.0f}" if seen.items_per_s >= 1000 else f"{seen.items_per_s:.4g}"
        held = f" with {' and '.join(seen.penalties)}" if seen.penalties else ""
        parts = [f"step {seen.step:,}", f"loss {seen.loss:.5f}{held}", f"{rate} {seen.unit}s/s"]
        parts += [f"{seen.utilization:.1%} MFU"] if seen.utilization is not None else []
        parts += [f"{format_seconds(seen.left_s)} left", format_bytes(seen.peak_bytes)]
        parts += [f"{seen.skipped} skipped"] if seen.skipped else []
        parts += [f"{name} {value:.4g}" for name, value in seen.figures.items()]
        text = " · ".join(parts)
        self._line.update(text)
        if seen.figures != self._figures:
            print_note(text)
            self._figures = seen.figures
