"""The help of options that take a plan, and the function that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redline.ladder.plan import Plan


PLAN_HELP = "A plan file, or a plan in one line: 'bf16 + compile'."


def read_plan(text: str) -> Plan:
    """Reads a plan file, or a plan in one line. Imports torch only when it is called."""
    from redline.ladder.plan import read_plan

    return read_plan(text)
