"""The result of a climb."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement
from redline.ladder.plan import Plan
from redline.machine.machine import Machine

if TYPE_CHECKING:
    from redline.ladder.report import Point


@dataclass(frozen=True)
class Climbed:
    """The result of a climb: the plan that won the final race, and every measurement.

    `climbed.plan.apply(model, samples=batch)` applies the plan; `climbed.report("report.html")` writes the report. In
    a notebook the result is displayed as a table of the rungs that were tried.
    """

    plan: Plan
    measurements: tuple[Measurement, ...]
    machine: Machine
    # `target` says whether the plan reached the target, and `resumed` what was resumed; each is empty if not requested.
    target: str = ""
    missed_target: bool = False
    resumed: str = ""
    # The reason for which no plan is an answer, if even the best one is above the memory limit; else empty.
    missed_limit: str = ""
    # The paths of the written files by their kind, such as "report".
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def final(self) -> Measurement:
        """The measurement of the winner in the final race, which is always the last measurement."""
        return self.measurements[-1]

    @property
    def ranges(self) -> tuple[str, ...]:
        """A sentence for each range of shapes, which says where the plan sets up again, falls back or fails."""
        return self.final.range_sentences

    @property
    def front(self) -> "tuple[Point, ...]":
        """The Pareto front: the plans that no other plan beats in speed, memory and quality together."""
        from redline.ladder.report import pareto_front

        return pareto_front(self.measurements)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report to `path`: Markdown if the name ends with .md, otherwise one HTML page."""
        from redline.ladder.report import Climb, render_html, render_markdown

        path = Path(path)
        render = render_markdown if path.suffix == ".md" else render_html
        write_text(path, render(Climb.of(self.measurements)))
        return path

    def _repr_html_(self) -> str:
        from redline.ladder.report.notebook import render_notebook

        return render_notebook(self.measurements)
