"""The sample chart: one point per sample, a box for the middle half, and a tick for the median."""

import numpy as np

from redline.ladder.report.climb import KINDS, Climb, Entry
from redline.notation import format_seconds
from redline.pages.svg import Drawing, Scale, padded, text_width

_MOST_POINTS = 160


def draw_distributions(climb: Climb, width: int) -> Drawing | None:
    entries = climb.milestones
    if not entries:
        return None
    stacked = width < 480
    row, top = (52, 26) if stacked else (34, 28)
    values = [v for e in entries for v in _samples(e)]
    left = 0 if stacked else min(230, 26 + max(text_width(e.label) for e in entries))
    right = width - (4 if stacked else 76)
    height = top + row * len(entries) + 4
    medians = (f"{e.label} {format_seconds(e.measurement.median_s())}, {len(_samples(e))} samples" for e in entries)
    drawing = Drawing(width, height, "Distributions of the samples", f"Median time per step: {'; '.join(medians)}.")
    scale = Scale(*padded(values, 1.04), left + 6, right, log=True)
    for tick in scale.ticks(4 if stacked else 8):
        drawing.line(scale(tick), top - 6, scale(tick), height - 4, "grid")
        drawing.text(scale(tick), top - 12, format_seconds(tick), "tick", "middle")
    for index, entry in enumerate(entries):
        y = top + index * row
        median = format_seconds(entry.measurement.median_s())
        text_y = y + 12 if stacked else y + 17
        room = width - text_width(median) - 10 if stacked else left - 14
        drawing.label(0, text_y, entry.label, room, "strong")
        drawing.text(width, text_y, median, "figure", "end")
        _draw_samples(drawing, entry, scale, y + 31 if stacked else y + 13)
    return drawing


def _draw_samples(drawing: Drawing, entry: Entry, scale: Scale, y: float) -> None:
    kind = KINDS.get(entry.row.role, "kept")
    samples = np.asarray(_samples(entry))
    first, middle, third = map(float, np.quantile(samples, (0.25, 0.5, 0.75)))
    picked = samples[:: max(1, -(-len(samples) // _MOST_POINTS))]
    # Spreads the points by a fixed sequence, not at random, so that the drawing is deterministic.
    spread = [((index * 0.618034) % 1 - 0.5) * 17 for index in range(len(picked))]
    drawing.dots([(scale(value), y + dy) for value, dy in zip(picked, spread, strict=True)], f"s-{kind}")
    x1, x3 = scale(first), scale(third)
    tip = f"{entry.row.plan}: middle half {format_seconds(first)} to {format_seconds(third)}"
    drawing.bar(min(x1, x3), y - 5, max(abs(x3 - x1), 1.0), 10, f"box m-{kind}", tip)
    drawing.line(scale(middle), y - 10, scale(middle), y + 10, "median")


def _samples(entry: Entry) -> tuple[float, ...]:
    return entry.measurement.samples[entry.measurement.shapes[0]]
