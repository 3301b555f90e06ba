"""Where commands print: results to stdout (a table, or JSON with --json), everything else to stderr."""

import json
import sys
from typing import Any

from rich.console import Console

results = Console()
progress = Console(stderr=True)


def fail(sentence: str) -> None:
    progress.print(f"[bold red]redline:[/] {sentence}", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout, for scripts; never wrapped, never coloured."""
    json.dump(data, sys.stdout, ensure_ascii=False, indent=2, default=str)
    sys.stdout.write("\n")
