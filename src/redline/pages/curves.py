"""Line charts of values by step, frame, second or text length, drawn as one SVG per page width."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from redline.pages.svg import Drawing, Scale, format_tick

_WIDTHS = (340, 440, 640)
# The most points per line; more points than pixels would not change the drawing.
_MOST_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """A line of a chart. `kind` is its CSS class; its last point has the CSS class `end-{kind}`."""

    name: str
    points: tuple[tuple[float, float], ...]
    kind: str = "c0"

    @property
    def thinned(self) -> tuple[tuple[float, float], ...]:
        stride = -(-len(self.points) // _MOST_POINTS) or 1
        # Takes every n-th value counted from the end, so that the last value is included.
        return self.points[::-1][::stride][::-1]


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    name: str,
    along: str = "step",
    write: Callable[[float], str] = format_tick,
    span: tuple[float, float | None] | None = None,
    up: str = "",
    lengths: bool = False,
    doubling: bool = False,
) -> Markup:
    """Returns the chart at every width; empty if no curve has two points.

    `title` is for screen readers, and `name` is a prefix for element ids, unique on the page. `along` and `up` are the
    labels of the x and y axis. `write` formats the values of the y axis; `span` is the start and the end of that axis
    (an end of None is just above the largest value). With `lengths` the x axis is logarithmic with a tick at every
    point; with `doubling` the y axis has ticks at powers of two.
    """
    shown = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in shown), default=0) < 2:
        return Markup("")
    steps = [step for curve in shown for step, _ in curve.points]
    low, high = _span([value for curve in shown for _, value in curve.points], span, doubling)
    last = "; ".join(f"{curve.name} ends at {write(curve.points[-1][1])}" for curve in shown)
    drawings = []
    for width in _WIDTHS:
        height, left, right, top = int(width * 0.6), 64, width - (14 if lengths else 10), 20
        bottom = height - 36
        x = Scale(min(steps), max(steps), left, right, log=lengths)
        y = Scale(low, high, bottom, top, log=doubling)
        drawing = Drawing(width, height, title, f"{title} by {along}: {last}.")
        for tick in _powers(low, high) if doubling else y.ticks(5):
            drawing.line(left, y(tick), right, y(tick), "grid")
            drawing.text(left - 8, y(tick) + 4, write(tick), "tick", "end")
        free = 0.0
        for tick in sorted(set(steps)) if lengths else x.ticks(5 if width > 400 else 3):
            text = short_count(int(tick)) if lengths else f"{tick:,g}"
            # A label is left out if it would overlap the one before.
            if x(tick) - 4 * len(text) > free:
                drawing.text(x(tick), bottom + 16, text, "tick", "middle")
                free = x(tick) + 4 * len(text)
        drawing.line(left, bottom, right, bottom, "axis")
        drawing.text((left + right) / 2, height - 4, along, "axis-title", "middle")
        if up:
            drawing.text(left - 8, 10, up, "axis-title")
        for curve in shown:
            drawing.path("M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in curve.thinned), curve.kind)
            for step, value in curve.points if lengths else curve.points[-1:]:
                said = f"{curve.name} {write(value)} at {along} {step:,.6g}"
                drawing.dot(x(step), y(value), 3, f"end-{curve.kind}", said)
        drawings.append(drawing.svg(name))
    return Markup("\n").join(drawings)


def _span(values: Sequence[float], given: tuple[float, float | None] | None, doubling: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if doubling:
        return 2.0 ** math.floor(math.log2(max(low, 1.0)) - 0.5), 2.0 ** math.ceil(math.log2(max(high, 1.0)) + 0.5)
    if given is None:
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        return low - margin, high + margin
    begin, end = given
    return begin, end if end is not None else (begin + (high - begin) * 1.08 if high > begin else begin + 1.0)


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log2(low)), round(math.log2(high))
    return [2.0**power for power in range(first, last + 1, (last - first) // 6 + 1)]


def short_count(count: int) -> str:
    """Formats exact multiples of 2**10 and 2**20 with a unit, for example 2,048 as 2K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
