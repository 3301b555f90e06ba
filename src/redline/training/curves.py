"""A training's journal as curves: one SVG for each width that a page may have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from redline.report.charts.svg import Drawing, Scale, format_tick

_WIDTHS = (340, 440, 640)
# More points than pixels draw the same line, only larger.
_MOST_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """Values against steps; `kind` is its class in the style sheet."""

    name: str
    points: tuple[tuple[int, float], ...]
    kind: str = "curve"

    @classmethod
    def of(cls, entries: Sequence[dict[str, Any]], key: str, name: str = "", kind: str = "curve") -> "Curve":
        found = [(entry["step"], entry[key]) for entry in entries if isinstance(entry.get(key), (int, float))]
        found = [(step, value) for step, value in found if math.isfinite(value)]
        stride = -(-len(found) // _MOST_POINTS) or 1
        # From the end, so that the last value is always there.
        return cls(name or key, tuple(found[::-1][::stride][::-1]), kind)


def draw_curves(title: str, curves: Sequence[Curve], name: str) -> Markup:
    """The same picture at every width; nothing when there are not two points to join."""
    shown = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in shown), default=0) < 2:
        return Markup("")
    return Markup("\n").join(_draw(title, shown, width).svg(name) for width in _WIDTHS)


def _draw(title: str, curves: Sequence[Curve], width: int) -> Drawing:
    height, left, right, top = int(width * 0.6), 58, width - 10, 20
    bottom = height - 36
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    margin = (max(values) - min(values)) * 0.06 or abs(max(values)) * 0.05 or 1.0
    x = Scale(min(steps), max(steps), left, right)
    y = Scale(min(values) - margin, max(values) + margin, bottom, top)
    last = "; ".join(f"{curve.name} ends at {curve.points[-1][1]:.4g}" for curve in curves)
    drawing = Drawing(width, height, title, f"{title} by step: {last}.")
    for tick in y.ticks(5):
        drawing.line(left, y(tick), right, y(tick), "grid")
        drawing.text(left - 8, y(tick) + 4, format_tick(tick), "tick", "end")
    for tick in x.ticks(5 if width > 400 else 3):
        drawing.text(x(tick), bottom + 16, f"{tick:,.0f}", "tick", "middle")
    drawing.line(left, bottom, right, bottom, "axis")
    drawing.text((left + right) / 2, height - 4, "step", "axis-title", "middle")
    for curve in curves:
        drawing.path("M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in curve.points), curve.kind)
        step, value = curve.points[-1]
        drawing.dot(x(step), y(value), 3, f"end-{curve.kind}", f"{curve.name} {value:.4g} at step {step:,}")
    return drawing
