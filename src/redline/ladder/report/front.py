"""The Pareto front of a climb: the plans that no other plan beats in speed, memory and quality together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.ladder.measurement import Measurement
from redline.ladder.objective import SMALLER, WORTHWHILE, is_within, kind_of_device
from redline.ladder.report.ladder import error_share, format_score, speedup, timed, worst_score
from redline.ladder.statistics import Interval

# An error counts as smaller than another plan's error if it is below `_CLOSER` times that error minus `_ROUNDING` times
# the gate's limit. So the rounding errors of two fp32 plans count as equal.
_CLOSER, _ROUNDING = 0.9, 0.01
_ROLES = ("fastest", "smallest", "most exact")
_BETWEEN = "between"


@dataclass(frozen=True)
class Point:
    """A plan of the front: `name` says what it is best at, `error_share` how much of a gate's limit it uses."""

    number: int
    name: str
    plan: str
    # How many times faster than the untouched model.
    speed: Interval
    peak_bytes: int
    quality: str
    error_share: float
    is_answer: bool

    @property
    def file_name(self) -> str:
        return f"{self.number}-{self.name.replace(', ', '-').replace(' ', '-')}.toml"


@dataclass(frozen=True)
class _Candidate:
    row: Measurement
    speed: Interval
    share: float
    is_answer: bool

    def beats(self, other: "_Candidate") -> bool:
        """Returns whether the plan is better than the other one in at least one figure, beyond the noise."""
        return self._is_faster(other) or self._is_smaller(other) or self._is_closer(other)

    def _is_faster(self, other: "_Candidate") -> bool:
        direct = speedup(self.row) if self.row.against == other.row.plan else None
        low = direct.low if direct is not None else self.speed.low / other.speed.middle
        return self.speed.middle > WORTHWHILE * other.speed.middle and low > 1

    def _is_smaller(self, other: "_Candidate") -> bool:
        kind = kind_of_device(str(self.row.machine.get("device", "cpu")))
        return self.row.peak_bytes < SMALLER[kind] * other.row.peak_bytes

    def _is_closer(self, other: "_Candidate") -> bool:
        return self.share < _CLOSER * other.share - _ROUNDING


def pareto_front(measurements: Sequence[Measurement]) -> tuple[Point, ...]:
    """Returns the front of one climb, the fastest plan first; empty if no plan was timed with its memory and gates.

    A plan is on the front if it is better than each other plan of the front in speed, memory or quality, beyond the
    noise. The answer of the climb is on it; then the other plans are added, the faster ones first.
    """
    speeds = _speeds(measurements)
    found: dict[str, _Candidate] = {}
    answer = next((m.plan for m in reversed(measurements) if m.role == "final" and m.verdict == "kept"), None)
    for m in measurements:  # a later measurement of a plan, such as the one in the final race, replaces an earlier one
        usable = timed(m) and m.scores and m.peak_bytes and is_within(m.peak_bytes, m.max_bytes)
        if usable and m.plan in speeds:
            found[m.plan] = _Candidate(m, speeds[m.plan], error_share(m.scores), m.plan == answer)
    front: list[_Candidate] = []
    for candidate in sorted(found.values(), key=lambda c: (not c.is_answer, -c.speed.middle)):
        if all(candidate.beats(other) for other in front):
            front = [other for other in front if other.is_answer or other.beats(candidate)]
            front.append(candidate)
    front.sort(key=lambda c: -c.speed.middle)
    names = _names(front)
    return tuple(
        Point(number, name, c.row.plan, c.speed, c.row.peak_bytes, _quality(c.row), c.share, c.is_answer)
        for number, (c, name) in enumerate(zip(front, names, strict=True), 1)
    )


def _speeds(measurements: Sequence[Measurement]) -> Mapping[str, Interval]:
    """Returns the speed-up of each plan over the untouched model, from the final race if the plan was in it.

    Other plans have the speed-up over the plan that they were timed against, times the speed-up of that plan.
    """
    speeds: dict[str, Interval] = {}
    for m in measurements:
        if m.plan == "eager" and timed(m):
            speeds[m.plan] = Interval(1.0, 1.0, 1.0)
    for m in measurements:
        ratio = speedup(m) if m.role == "final" and m.against == "eager" else None
        if ratio is not None:
            speeds[m.plan] = ratio
    raced = set(speeds)
    for m in measurements:
        ratio, base = speedup(m), speeds.get(m.against)
        if m.plan not in raced and ratio is not None and base is not None:
            middle = base.middle
            speeds[m.plan] = Interval(ratio.middle * middle, ratio.low * middle, ratio.high * middle)
    return speeds


def _names(front: Sequence[_Candidate]) -> list[str]:
    if not front:
        return []
    best = (
        max(front, key=lambda c: c.speed.middle),
        min(front, key=lambda c: c.row.peak_bytes),
        min(front, key=lambda c: c.share),
    )
    roles = [[role for role, winner in zip(_ROLES, best, strict=True) if winner is c] for c in front]
    return [", ".join(found) or _BETWEEN for found in roles]


def _quality(row: Measurement) -> str:
    worst = worst_score(row.scores)
    return format_score(worst) if worst else ""
