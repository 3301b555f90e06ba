"""A table of the goals in goals.toml with the measured figures from the result files."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline import RedlineError

GOALS = Path("benchmarks/goals.toml")
RESULTS = Path("benchmarks/results")
_OURS = "redline"
_GIB = 2**30

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A limit (`most` or `least`) on a figure of a result row.

    With `over`, the figure is divided by that of another row, or of the best peer if `over` names no arm; ratios of
    times are inverted, so that higher is faster.
    """

    what: str
    result: str
    row: Row
    figure: str
    over: Row = field(default_factory=dict)
    share_of: str = ""
    unit: str = ""
    most: float | None = None
    least: float | None = None

    def __post_init__(self) -> None:
        if (self.most is None) == (self.least is None):
            raise RedlineError(f"the goal {self.what!r} needs either most or least.")

    def measured(self, root: Path) -> float:
        lines = (root / RESULTS / self.result).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line]
        ours = self._one(rows, self.row)
        if self.share_of:
            return ours[self.figure] / ours[self.share_of]
        if self.over:
            return self._ratio(rows, ours[self.figure])
        return ours[self.figure] / (_GIB if self.unit == "GiB" else 1)

    def _ratio(self, rows: list[Row], ours: float) -> float:
        is_time = "ms" in self.figure.split("_")
        if "arm" in self.over:
            other = self._one(rows, self.over)[self.figure]
        else:
            peers = [row[self.figure] for row in _matching(rows, self.over) if not row["arm"].startswith(_OURS)]
            other = min(peers) if is_time else max(peers)
        return other / ours if is_time else ours / other

    def _one(self, rows: list[Row], wanted: Row) -> Row:
        found = [row for row in _matching(rows, wanted) if self.figure in row]
        if len(found) != 1:
            raise RedlineError(f"the goal {self.what!r} finds {len(found)} measured rows {dict(wanted)}, not one.")
        return found[0]

    def is_met(self, value: float) -> bool:
        return value <= self.most if self.most is not None else value >= (self.least or 0)

    def show(self, value: float) -> str:
        if self.share_of or self.figure == "accuracy":
            return f"{100 * value:.3g}%"
        if self.over:
            return f"{value:.2f}×"
        number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        return f"{number} {self.unit}"


def read_goals(root: Path) -> list[Goal]:
    document = tomllib.loads((root / GOALS).read_text(encoding="utf-8"))
    return [Goal(**entry) for entry in document["goal"]]


def goal_lines(root: Path) -> list[list[str]]:
    """Returns a row for each goal: description, limit, measured value and result file."""
    lines = []
    for goal in read_goals(root):
        value = goal.measured(root)
        bound = f"≤ {goal.show(goal.most)}" if goal.most is not None else f"≥ {goal.show(goal.least or 0)}"
        shown = f"**{goal.show(value)}**" if goal.is_met(value) else f"{goal.show(value)}, missed"
        link = f"[{Path(goal.result).name}](../{(RESULTS / goal.result).as_posix()})"
        lines.append([goal.what, bound, shown, link])
    return lines


def _matching(rows: list[Row], wanted: Row) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
