"""Where commands print: results to stdout (a table, or JSON with --json), everything else to stderr."""

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

# Whoever closes them wants to hear nothing.
sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
# Piped output is read by programs and pagers: wide enough that no table is squeezed to 80 columns.
# A file may be called :smile:, and is to be printed as it is called.
results = Console(width=None if sys.stdout.isatty() else 200, emoji=False)
progress = Console(stderr=True, width=None if sys.stderr.isatty() else 200, emoji=False)


def fail(sentence: str) -> None:
    progress.print(f"[bold red]redline:[/] {escape(sentence)}", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout, for scripts; never wrapped, never coloured."""
    json.dump(_finite(data), sys.stdout, ensure_ascii=False, indent=2, default=str, allow_nan=False)
    sys.stdout.write("\n")
    # Whoever has left, or has no room, is met here: before anything else is said.
    sys.stdout.flush()


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """A warning is for the reader, who has no use for the line of the program that it came from."""

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        progress.print(f"[yellow]{escape((str(message).splitlines() or [''])[0])}[/]", highlight=False)

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield
