"""The settings of a climb, a verification and a benchmark."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.ladder.choices import CALLERS
from redline.ladder.objective import Objective
from redline.ladder.plan import parse_rung
from redline.ladder.rung import Rung
from redline.ladder.search.target import Target
from redline.ladder.shape_ranges import ShapeRange
from redline.notation import parse_bytes, parse_seconds


@dataclass(frozen=True)
class Settings:
    """What to measure and how.

    `only`, `without`, `target`, `max_bytes`, `max_error`, `budget_s`, `ablate` and `resume` apply only to a climb.
    """

    workload: str
    folder: Path | None = None
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    # The ranges among the shapes, of which the final plan tries every size.
    ranges: tuple[ShapeRange, ...] = ()
    device: str = "auto"
    objective: Objective = Objective.LATENCY
    callers: int = CALLERS
    target: Target | None = None
    # The largest peak memory of the final plan, and the largest score of the first gate that measures an error. The
    # value 0 means no limit.
    max_bytes: int = 0
    max_error: float = 0.0
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

        if self.callers < 1:
            raise RedlineError(f"there must be at least one caller, not {self.callers}.")
        if not (math.isfinite(self.max_error) and self.max_error >= 0):
            raise RedlineError(f"the maximum error must be a finite number above zero, not {self.max_error}.")

    @property
    def measurements_path(self) -> Path | None:
        return self.folder / "measurements.jsonl" if self.folder is not None else None


def read_rungs(rungs: Sequence[Rung | str]) -> tuple[Rung, ...]:
    return tuple(parse_rung(rung) if isinstance(rung, str) else rung for rung in rungs)


def read_duration(value: str | float) -> float:
    """Converts a duration such as `"5m"`, or a number of seconds, to seconds."""
    return parse_seconds(value) if isinstance(value, str) else float(value)


def read_size(value: str | int | None) -> int:
    """Converts a size such as `"8GiB"`, or a number of bytes, to bytes; None gives 0."""
    size = parse_bytes(value) if isinstance(value, str) else value or 0
    if size < 0 or (value is not None and not size):
        raise RedlineError(f"the maximum memory must be above zero, not {value}.")
    return size


def read_max_error(value: float | None) -> float:
    """Returns the maximum error; None, for no limit, gives 0."""
    if value is not None and not value > 0:
        raise RedlineError(f"the maximum error must be above zero, not {value}.")
    return value or 0.0
