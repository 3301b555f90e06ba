"""Draws curves over text lengths, on a logarithmic axis."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from redline.ladder.report.charts.svg import Drawing, Scale, format_tick
from redline.pages import CURVE_COLORS

_WIDTHS = (340, 440, 640)


@dataclass(frozen=True)
class LengthCurve:
    """Values against lengths in tokens."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Axis:
    """`span` fixes the limits; `doubling` makes ticks at powers of two; `write` formats the ticks."""

    title: str
    span: tuple[float, float] | None = None
    doubling: bool = False
    write: Callable[[float], str] = format_tick


def draw(title: str, curves: Sequence[LengthCurve], name: str, across: str, up: Axis) -> Markup:
    """Returns the drawing at every page width; nothing if no curve has two points."""
    shown = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in shown), default=0) < 2:
        return Markup("")
    return Markup("\n").join(_draw(title, shown, width, across, up).svg(name) for width in _WIDTHS)


def _draw(title: str, curves: Sequence[LengthCurve], width: int, across: str, up: Axis) -> Drawing:
    height, left, right, top = int(width * 0.6), 66, width - 14, 20
    bottom = height - 36
    lengths = sorted({length for curve in curves for length, _ in curve.points})
    values = [value for curve in curves for _, value in curve.points]
    x = Scale(lengths[0], lengths[-1], left, right, log=True)
    y = Scale(*(up.span or _span(values, up.doubling)), bottom, top, log=up.doubling)
    words = "; ".join(f"{curve.name} {up.write(curve.points[-1][1])}" for curve in curves)
    drawing = Drawing(width, height, title, f"{title} at the largest length: {words}.")
    for tick in _powers(y.low, y.high) if up.doubling else y.ticks(5):
        drawing.line(left, y(tick), right, y(tick), "grid")
        drawing.text(left - 8, y(tick) + 4, up.write(tick), "tick", "end")
    free = 0.0
    for length in lengths:
        word = short_count(length)
        # A label is left out if it would overlap the one before.
        if x(length) - 4 * len(word) > free:
            drawing.text(x(length), bottom + 16, word, "tick", "middle")
            free = x(length) + 4 * len(word)
    drawing.line(left, bottom, right, bottom, "axis")
    drawing.text((left + right) / 2, height - 4, across, "axis-title", "middle")
    drawing.text(left - 8, 10, up.title, "axis-title")
    for number, curve in enumerate(curves):
        kind = f"c{number % CURVE_COLORS}"
        drawing.path("M" + "L".join(f"{x(length):.1f} {y(value):.1f}" for length, value in curve.points), kind)
        for length, value in curve.points:
            drawing.dot(x(length), y(value), 3, f"end-{kind}", f"{curve.name}: {up.write(value)} at {length:,} tokens")
    return drawing


def _span(values: Sequence[float], doubling: bool) -> tuple[float, float]:
    if doubling:
        low, high = (math.log2(max(value, 1.0)) for value in (min(values), max(values)))
        return 2.0 ** math.floor(low - 0.5), 2.0 ** math.ceil(high + 0.5)
    margin = (max(values) - min(values)) * 0.08 or abs(max(values)) * 0.1 or 1.0
    return min(values) - margin, max(values) + margin


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log2(low)), round(math.log2(high))
    return [2.0**power for power in range(first, last + 1, (last - first) // 6 + 1)]


def short_count(count: int) -> str:
    """Formats exact multiples of 2**10 and 2**20 with a unit, for example 2,048 as 2K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
