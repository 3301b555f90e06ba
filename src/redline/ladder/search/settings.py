"""The settings of a climb, a verification and a benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.ladder.objective import Objective
from redline.ladder.plan import parse_rung
from redline.ladder.rung import Rung
from redline.ladder.search.target import Target
from redline.notation import parse_seconds

# Input shapes, each given as options of the workload's function such as {"batch": 8}: a list, or a mapping from labels.
Shapes = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What to measure and how; `only`, `without`, `target`, `budget_s`, `ablate` and `resume` apply only to a climb."""

    workload: str
    folder: Path | None = None
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    device: str = "auto"
    objective: Objective = Objective.LATENCY
    target: Target | None = None
    budget_s: float | None = None
    only: tuple[Rung, ...] = ()
    without: tuple[Rung, ...] = ()
    reference: str = "fp32"
    timeout_s: float = 300.0
    sampling_s: float = 6.0
    ablate: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        if self.reference not in ("fp32", "fp64"):
            raise RedlineError(f"unknown reference precision {self.reference!r}: choose fp32 or fp64.")
        if both := [rung for rung in self.only if rung in self.without]:
            raise RedlineError(f"{both[0]} is both in the rungs to try and in those to leave out: remove it from one.")

    @property
    def measurements_path(self) -> Path | None:
        return self.folder / "measurements.jsonl" if self.folder is not None else None


def read_rungs(rungs: Sequence[Rung | str]) -> tuple[Rung, ...]:
    return tuple(parse_rung(rung) if isinstance(rung, str) else rung for rung in rungs)


def read_duration(value: str | float) -> float:
    """Converts a duration such as `"5m"`, or a number of seconds, to seconds."""
    return parse_seconds(value) if isinstance(value, str) else float(value)


def read_shapes(shapes: Shapes | None) -> Mapping[str, Mapping[str, Any]]:
    """Returns the shapes by label; in a list, the label of a shape is its options (`batch=8,size=224`)."""
    if isinstance(shapes, Mapping):
        return shapes or {"": {}}
    return {",".join(f"{key}={value}" for key, value in shape.items()): shape for shape in shapes or ({},)}
