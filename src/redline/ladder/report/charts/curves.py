"""Line charts of values by step, frame or second, drawn as one SVG per page width."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from redline.ladder.report.charts.svg import Drawing, Scale, format_tick

_WIDTHS = (340, 440, 640)
# More points than pixels do not change the line.
_MOST_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """A line of a chart. `kind` is its class in the style sheet; its last point has the class `end-{kind}`."""

    name: str
    points: tuple[tuple[float, float], ...]
    kind: str = "c0"

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]], key: str, name: str = "", kind: str = "c0") -> "Curve":
        """Returns the curve of `key` over `step` in the entries of a training journal."""
        found = [(entry["step"], entry[key]) for entry in entries if isinstance(entry.get(key), (int, float))]
        return cls(name or key, tuple((step, value) for step, value in found if math.isfinite(value)), kind)

    @property
    def thinned(self) -> tuple[tuple[float, float], ...]:
        stride = -(-len(self.points) // _MOST_POINTS) or 1
        # Counted from the end, so that the last value is included.
        return self.points[::-1][::stride][::-1]


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    name: str,
    along: str = "step",
    write: Callable[[float], str] = format_tick,
    span: tuple[float, float | None] | None = None,
) -> Markup:
    """Returns the chart at every width; empty if no curve has two points.

    `title` is for screen readers, and `name` is a prefix for element ids, unique on the page. `along` is the label of
    the x axis. `write` formats the values of the y axis, and `span` sets its start and (unless None) its end.
    """
    shown = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in shown), default=0) < 2:
        return Markup("")
    return Markup("\n").join(_draw(title, shown, width, along, write, span).svg(name) for width in _WIDTHS)


def _draw(
    title: str,
    curves: Sequence[Curve],
    width: int,
    along: str,
    write: Callable[[float], str],
    span: tuple[float, float | None] | None,
) -> Drawing:
    height, left, right, top = int(width * 0.6), 64, width - 10, 20
    bottom = height - 36
    steps = [step for curve in curves for step, _ in curve.points]
    x = Scale(min(steps), max(steps), left, right)
    y = Scale(*_span([value for curve in curves for _, value in curve.points], span), bottom, top)
    last = "; ".join(f"{curve.name} ends at {write(curve.points[-1][1])}" for curve in curves)
    drawing = Drawing(width, height, title, f"{title} by {along}: {last}.")
    for tick in y.ticks(5):
        drawing.line(left, y(tick), right, y(tick), "grid")
        drawing.text(left - 8, y(tick) + 4, write(tick), "tick", "end")
    for tick in x.ticks(5 if width > 400 else 3):
        drawing.text(x(tick), bottom + 16, f"{tick:,g}", "tick", "middle")
    drawing.line(left, bottom, right, bottom, "axis")
    drawing.text((left + right) / 2, height - 4, along, "axis-title", "middle")
    for curve in curves:
        drawing.path("M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in curve.thinned), curve.kind)
        step, value = curve.points[-1]
        said = f"{curve.name} {write(value)} at {along} {step:,.6g}"
        drawing.dot(x(step), y(value), 3, f"end-{curve.kind}", said)
    return drawing


def _span(values: Sequence[float], given: tuple[float, float | None] | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if given is None:
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        return low - margin, high + margin
    begin, end = given
    return begin, end if end is not None else (begin + (high - begin) * 1.08 if high > begin else begin + 1.0)
