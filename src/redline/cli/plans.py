"""Reads a plan from a command-line argument: a file, or the one-line form."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redline.ladder.plan import Plan


PLAN_HELP = "A plan file, or a plan in one line: 'bf16 + compile'."


def read_plan(text: str) -> Plan:
    """Loads a plan file if the text names one, else parses the one-line form."""
    from redline.ladder.plan import Plan

    # Path.is_file() raises if the text is longer than a file name may be; os.path.isfile() returns False.
    if text.endswith(".toml") or os.path.isfile(text):
        return Plan.load(text)
    return Plan.parse(text)
