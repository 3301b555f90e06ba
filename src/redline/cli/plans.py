"""A plan as it is given on the command line: a file, or one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redline.ladder.plan import Plan


PLAN_HELP = "A plan file, or a plan in one line: 'bf16 + compile'."


def read_plan(text: str) -> Plan:
    """A file when it looks like one or is one, else the one-line form."""
    from redline.ladder.plan import Plan

    # A line can be longer than a file's name may be; os.path says no to that where pathlib raises.
    if text.endswith(".toml") or os.path.isfile(text):
        return Plan.load(text)
    return Plan.parse(text)
