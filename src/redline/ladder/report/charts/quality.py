"""The quality chart: speed-up and score at the first gate for each plan, with the limit as a red line."""

import math
from collections.abc import Sequence

from redline.ladder.gate import Score
from redline.ladder.report.climb import KINDS, TRIED, Climb, Entry, format_ratio
from redline.pages.svg import Drawing, Scale, format_tick, padded


def draw_quality(climb: Climb, width: int) -> Drawing | None:
    gate = next((e.measurement.scores[0] for e in climb.entries if e.measurement.scores), None)
    shown = [e for e in climb.entries if e.row.role in ("baseline", "compile", *TRIED) or e is climb.final]
    judged = [(e, score) for e in shown if (score := _score(e, gate)) is not None]
    placed = [(e, score) for e, score in judged if e.row.over_start is not None]
    if gate is None or len(placed) < 2:
        return None
    untimed = [(e, score) for e, score in judged if e.row.over_start is None and not score.passed]
    height, left, right, top = int(min(380, width * 0.82)), 54, width - 14, 14
    bottom = height - 44
    speeds = [e.row.over_start or 1.0 for e, _ in placed]
    # Refused plans have a score but no speed, so they are drawn in a separate lane.
    lane = 22 if untimed else 0
    x = Scale(min(0.9, *speeds) * 0.95, max(1.2, *speeds) * 1.06, left + lane, right)
    y = _score_scale([s.value for _, s in placed + untimed], gate, bottom, top)
    name = gate.metric.replace("_", " ")
    words = "; ".join(f"{e.label} {format_ratio(e.row.over_start or 0)} at {s.value:.3g}" for e, s in placed)
    drawing = Drawing(width, height, f"Speed against {name}", f"{name}, limit {gate.limit:g}: {words}.")
    drawing.axes(x, y, left, ("{:g}×".format, format_tick), (6 if width > 400 else 4, 6))
    drawing.text((left + right) / 2, height - 6, "times faster than eager →", "axis-title", "middle")
    drawing.text(left, 9, f"{name} ({gate.better} is better)", "axis-title")
    limit_y = y(gate.limit)
    drawing.line(left, limit_y, right, limit_y, "limit")
    drawing.limit_text(right, limit_y - 5, f"gate: {'≤' if gate.better == 'lower' else '≥'} {gate.limit:g}")
    _draw_path(drawing, climb, placed, x, y)
    inside = (left, 16.0, width, bottom - 2.0)
    for entry, score in untimed:
        px, py = left + 9, y(score.value)
        drawing.path(f"M{px - 4:.1f} {py - 4:.1f}l8 8m0 -8l-8 8", "cross")
        drawing.taken.append((px - 6, py - 6, px + 6, py + 6))
        drawing.label_point(px, py, f"{entry.label} refused", inside, "quiet")
    # The most important points are drawn last, on top of the others, but their labels are placed first.
    placed.sort(key=lambda pair: ("faint", "kept", "compiled", "base", "final").index(_kind(climb, pair[0])))
    for entry, score in placed:
        kind, speed = _kind(climb, entry), entry.row.over_start or 1.0
        tip = f"{entry.row.plan}: {format_ratio(speed)}, {name} {score.value:.3g}"
        drawing.point(x(speed), y(score.value), 3.5 if kind == "faint" else 5.5, f"m-{kind}", tip)
    for entry, score in reversed(placed):
        if _kind(climb, entry) != "faint":
            drawing.label_point(x(entry.row.over_start or 1.0), y(score.value), _short(entry), inside)
    return drawing


def _score(entry: Entry, gate: Score | None) -> Score | None:
    """Returns the score of the entry at the gate; None if missing or not finite (only the table shows it)."""
    found = [s for s in entry.measurement.scores if gate is not None and s.metric == gate.metric]
    return found[0] if found and math.isfinite(found[0].value) else None


def _score_scale(values: Sequence[float], gate: Score, bottom: float, top: float) -> Scale:
    if gate.better == "lower" and gate.limit > 0:
        # An error of zero is drawn at the bottom of the logarithmic axis.
        positive = [v for v in values if v > 0] + [gate.limit]
        low, high = padded([max(min(positive), gate.limit * 1e-6), max(positive)], 2.5)
        return Scale(low, high, bottom, top, log=True)
    low, high = min(*values, gate.limit), max(*values, gate.limit)
    margin = (high - low) * 0.12 or abs(high) * 0.05 or 1.0
    return Scale(low - margin, high + margin, bottom, top)


def _draw_path(drawing: Drawing, climb: Climb, placed: Sequence[tuple[Entry, Score]], x: Scale, y: Scale) -> None:
    """Connects the baseline, the kept rungs and the final plan."""
    scores = {id(entry): score for entry, score in placed}
    way = [e for e in (climb.baseline, *climb.kept, climb.final) if e is not None and id(e) in scores]
    points = [f"{x(e.row.over_start or 1.0):.1f} {y(scores[id(e)].value):.1f}" for e in way]
    if len(points) > 1:
        drawing.path("M" + "L".join(points), "way")


def _kind(climb: Climb, entry: Entry) -> str:
    if entry is climb.final or entry is climb.baseline or entry is climb.compiled:
        return KINDS[entry.row.role]
    return "kept" if entry.row.verdict == "kept" else "faint"


def _short(entry: Entry) -> str:
    if entry.row.role == "compile":
        return "torch.compile"
    return ("+ " if entry.row.role in TRIED else "") + entry.label.partition("(")[0]
