"""Ranges of input shapes, such as `batch=1..32`: which sizes are timed and tried, and what a plan does at each.

Both ends and a size between them are timed and judged like separate shapes. The other sizes are only tried once at the
end, to find where the plan sets up again (compiles, captures or builds an engine), and where it falls back or fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from redline.errors import RedlineError
from redline.notation import format_seconds

# Input shapes, each given as options of the workload's function such as {"batch": 8}: a list, or a mapping from labels.
Shapes = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
# The largest number of sizes of one range that are tried.
_MOST_SIZES = 33
# The events of `SizeResult`: what a plan does at a size, in the words that `describe_range` uses.
SETS_UP, FALLS_BACK, FAILS, READY = "sets up again", "falls back", "fails", "ready"


@dataclass(frozen=True)
class ShapeRange:
    """Options of a workload's function, at least one of which is a range of sizes.

    Several ranges advance together, each from its first to its last size.
    """

    label: str
    options: Mapping[str, Any]

    def shapes(self) -> dict[str, dict[str, Any]]:
        """Returns the shapes that are timed, by label: the first, one between, and the last."""
        # The shape between is at a third of the range, because in 1..32 the middle size behaves like the largest.
        return {label_of(shape): shape for shape in map(self._at, (0.0, 1 / 3, 1.0))}

    def every(self) -> dict[str, dict[str, Any]]:
        """Returns the shapes that are tried once, by label, from the first; at most `_MOST_SIZES`, evenly spaced."""
        steps = min(_MOST_SIZES, self.count) - 1
        return {label_of(shape): shape for shape in (self._at(step / max(1, steps)) for step in range(steps + 1))}

    @property
    def count(self) -> int:
        """Returns the number of sizes, which is that of the longest range."""
        return max(len(sizes) for sizes in self.options.values() if isinstance(sizes, range))

    def _at(self, place: float) -> dict[str, Any]:
        return {
            key: value[round(place * (len(value) - 1))] if isinstance(value, range) else value
            for key, value in self.options.items()
        }


@dataclass(frozen=True)
class SizeResult:
    """What a plan did at one size.

    `event` is SETS_UP, FALLS_BACK, FAILS or READY, and `reason` says why the plan fell back or failed.
    """

    shape: str
    event: str
    first_s: float = 0.0
    step_s: float = 0.0
    reason: str = ""


def read_shapes(shapes: Shapes | None) -> Mapping[str, Mapping[str, Any]]:
    """Returns the shapes to time by label; in a list, the label of a shape is its options (`batch=8,size=224`)."""
    found: dict[str, Mapping[str, Any]] = {}
    for label, shape in _labelled(shapes):
        one = ShapeRange(label, shape)
        found |= one.shapes() if _has_range(shape) else {label: shape}
    return found or {"": {}}


def read_ranges(shapes: Shapes | None) -> tuple[ShapeRange, ...]:
    """Returns the shapes that contain a range."""
    return tuple(ShapeRange(label, shape) for label, shape in _labelled(shapes) if _has_range(shape))


def label_of(shape: Mapping[str, Any]) -> str:
    """Returns the options of a shape as text: `batch=8,size=224`; a range is written `batch=1..32`."""
    return ",".join(f"{key}={_range_text(value)}" for key, value in shape.items())


def describe_range(label: str, results: Sequence[SizeResult], count: int) -> str:
    """Returns a sentence that says where in the range the plan sets up again, falls back or fails."""
    parts = []
    for event in (SETS_UP, FALLS_BACK, FAILS):
        chosen = [result for result in results if result.event == event]
        if not chosen:
            continue
        where = _listed(chosen, results)
        times = sorted(result.first_s for result in chosen)
        if event == SETS_UP:
            spent = format_seconds(times[0]), format_seconds(times[-1])
            where += f" ({spent[0]})" if spent[0] == spent[1] else f" ({spent[0]} to {spent[1]} each)"
        else:
            where += f" ({chosen[0].reason})" if chosen[0].reason else ""
        parts.append(f"{event} at {where}")
    missing = [event for event in (SETS_UP, FALLS_BACK) if not any(result.event == event for result in results)]
    parts += [f"{event} nowhere" for event in missing]
    tried = "" if len(results) == count else f", of which {len(results)} were tried"
    return f"{label} ({count} sizes{tried}): {'; '.join(parts)}"


def _labelled(shapes: Shapes | None) -> list[tuple[str, Mapping[str, Any]]]:
    if isinstance(shapes, Mapping):
        found = list(shapes.items())
    else:
        found = [(label_of(shape), shape) for shape in shapes or ()]
    for label, shape in found:
        if not isinstance(shape, Mapping):
            raise RedlineError(f"{shape!r} is not a shape: write the options of the workload, such as {{'batch': 8}}.")
        if empty := [key for key, value in shape.items() if isinstance(value, range) and not value]:
            raise RedlineError(f"the range of {empty[0]!r} in {label or 'a shape'} is empty: write low..high.")
    return found


def _has_range(shape: Mapping[str, Any]) -> bool:
    return any(isinstance(value, range) for value in shape.values())


def _range_text(value: Any) -> str:
    if not isinstance(value, range) or not value:
        return str(value)
    return f"{value[0]}..{value[-1]}" + (f":{value.step}" if value.step != 1 else "")


def _listed(chosen: Sequence[SizeResult], results: Sequence[SizeResult]) -> str:
    """Lists sizes of a range; neighbors are joined: `batch=1, batch=8 to batch=32`."""
    if len(chosen) == len(results):
        return f"each of the {len(results)} sizes" if len(results) > 1 else chosen[0].shape
    place = {result.shape: index for index, result in enumerate(results)}
    runs: list[list[SizeResult]] = []
    for _, members in groupby(enumerate(chosen), lambda pair: place[pair[1].shape] - pair[0]):
        runs.append([result for _, result in members])
    texts = [text for run in runs for text in _run_texts([result.shape for result in run])]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def _run_texts(shapes: list[str]) -> list[str]:
    return shapes if len(shapes) < 3 else [f"{shapes[0]} to {shapes[-1]}"]
