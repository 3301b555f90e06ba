"""Output of commands: results go to stdout (a table, or JSON with --json), everything else to stderr."""

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# If stdout or stderr is closed, Python sets it to None; text printed to it is then discarded.
sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
# Piped output is read by programs and pagers, so tables are wider than the default of 80 columns.
# Emoji codes such as `:key:` are not replaced, because a file name may contain one.
results = Console(width=None if sys.stdout.isatty() else 200, emoji=False, highlight=False)
progress = Console(stderr=True, width=None if sys.stderr.isatty() else 200, emoji=False, highlight=False)
YES, NO = "[green]yes[/]", "[red]no[/]"


def fail(sentence: str, head: str = "redline") -> None:
    progress.print(f"[bold red]{head}:[/] {escape(sentence)}", soft_wrap=True)


def note(sentence: str, style: str = "dim") -> None:
    progress.print(f"[{style}]{escape(sentence)}[/]", soft_wrap=True)


def wrote(path: Path) -> None:
    progress.print(f"wrote {escape(str(path))}", soft_wrap=True)


def plain_table(*columns: str, **look: Any) -> Table:
    """Returns an empty table without borders; `look` holds further options of Rich's `Table`."""
    return Table(*columns, box=None, pad_edge=False, **look)


def print_json(data: Any) -> None:
    """Prints one JSON document to stdout, without wrapping or colors."""
    json.dump(_finite(data), sys.stdout, ensure_ascii=False, indent=2, default=str, allow_nan=False)
    sys.stdout.write("\n")
    # Flushed now, so that a broken pipe or a full disk is reported here.
    sys.stdout.flush()


def _finite(data: Any) -> Any:
    """Replaces NaN and infinity by None, because JSON has neither."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Prints only the first line of a warning, without the source line that it came from."""

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        note((str(message).splitlines() or [""])[0], "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield
