"""The ladder of one climb as a standalone SVG file, for a README or a slide."""

from dataclasses import dataclass

from markupsafe import Markup

from redline.ladder.report.climb import KINDS, TRIED, UNTRIED, Climb, Entry, format_ratio
from redline.ladder.report.ladder import Row
from redline.notation import format_bytes, format_seconds
from redline.pages.svg import Drawing, Scale, shorten, text_width

# An image in a README cannot use the style sheet of a page, so it defines its colors for light and for dark mode.
_STYLE = """
text { font: 13px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1c1b1a; }
.title { font-size: 19px; font-weight: 680; } .subtitle, .quiet { fill: #6b6761; }
.strong, .figure { font-weight: 600; }
.card { fill: #ffffff; stroke: #d8d4cd; } .track { fill: #f1efeb; }
.base { fill: #8f8b84; } .compiled { fill: #b27a1d; } .kept { fill: #2f7f83; } .final { fill: #c41e3a; }
@media (prefers-color-scheme: dark) {
text { fill: #ecebe8; } .subtitle, .quiet { fill: #a6a29b; }
.card { fill: #1d1d1c; stroke: #3d3a36; } .track { fill: #2a2927; }
.compiled { fill: #d79d44; } .kept { fill: #3f9a9e; } .final { fill: #ff5d73; }
}
"""
_WIDTH, _MARGIN, _ROW, _TOP, _BAR = 900, 28, 28, 96, 14


@dataclass(frozen=True)
class _Step:
    """One row: a bar if `gain` is set; otherwise a rung that was not kept, with the reason."""

    label: str
    kind: str
    gain: float | None
    note: str


def climb_svg(climb: Climb) -> str:
    """Returns an SVG document with one bar per step of a climb, from the original model to the final plan.

    A bar is as long as the cumulative gain over the original model: the reduction of peak memory if memory is the
    objective, otherwise the speed-up. Rungs that were tried and not kept are gray and show the reason instead of a bar.
    Rungs that were never tried are listed in the last line.
    """
    title, width = f"{climb.subject.workload} on {climb.machine.name}", _WIDTH
    steps = _steps(climb)
    untried = [(e.row.rung or e.row.plan).partition("(")[0] for e in climb.tried if e.row.verdict in UNTRIED]
    height = _TOP + _ROW * len(steps) + (_ROW if untried else 0) + 16
    words = "; ".join(f"{step.label} {step.note}" for step in steps)
    drawing = Drawing(width, height, title, f"Gain after each rung: {words}.")
    card = '<rect class="card" x=".5" y=".5" width="{}" height="{}" rx="12"/>'
    drawing.parts.append(Markup(card).format(width - 1, height - 1))
    drawing.text(_MARGIN, 42, shorten(title, (width - 2 * _MARGIN) * 0.66), "title")
    drawing.label(_MARGIN, 66, climb.headline(), width - 2 * _MARGIN, "subtitle")
    left = _MARGIN + min(width * 0.28, 20 + max((text_width(step.label) for step in steps), default=0))
    right = width - _MARGIN - 16 - max((text_width(step.note) for step in steps if step.gain), default=0)
    scale = Scale(0.0, max((step.gain for step in steps if step.gain), default=1.0), left, right)
    for index, step in enumerate(steps):
        _draw_step(drawing, step, scale, _TOP + index * _ROW)
    if untried:
        text = f"Not tried: {', '.join(dict.fromkeys(untried))}"
        drawing.label(_MARGIN, height - 20, text, width - 2 * _MARGIN, "quiet")
    return str(drawing.document(_STYLE))


def _draw_step(drawing: Drawing, step: _Step, scale: Scale, y: float) -> None:
    room = scale.start - _MARGIN - 12
    if step.gain is None:
        drawing.label(_MARGIN, y + 13, step.label, room, "quiet")
        # Regular text is narrower than the bold text whose width `label` estimates.
        drawing.label(scale.start, y + 13, step.note, (drawing.width - _MARGIN - scale.start) * 1.08, "quiet")
        return
    drawing.label(_MARGIN, y + 13, step.label, room, "strong")
    drawing.bar(scale.start, y + 1, scale.end - scale.start, _BAR, "track")
    drawing.bar(scale.start, y + 1, scale(step.gain) - scale.start, _BAR, step.kind)
    drawing.text(drawing.width - _MARGIN, y + 13, step.note, "figure", "end")


def _steps(climb: Climb) -> list[_Step]:
    memory = climb.subject.objective == "memory"
    removed = {entry.row.rung for entry in climb.ablations if entry.row.verdict == "dropped"}
    steps = []
    for entry in climb.entries:
        row = entry.row
        tried = row.role in TRIED and row.verdict not in UNTRIED
        if not (tried or entry is climb.baseline or entry is climb.compiled or entry is climb.final):
            continue
        gain = _gain(row, climb.baseline, memory)
        if tried and (row.verdict != "kept" or gain is None):
            reason = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
            steps.append(_Step(entry.label, "quiet", None, reason))
            continue
        kind = KINDS.get(row.role, "kept")
        label = f"+ {entry.label}" if kind == "kept" else entry.label
        label += " (removed later)" if tried and row.rung.partition("(")[0] in removed else ""
        steps.append(_Step(label, kind, gain, _note(row, gain, memory)))
    return steps


def _gain(row: Row, baseline: Entry | None, memory: bool) -> float | None:
    if not memory:
        return row.over_start
    before = baseline.row.peak_bytes if baseline is not None else None
    return before / row.peak_bytes if before and row.peak_bytes and row.over_start is not None else None


def _note(row: Row, gain: float | None, memory: bool) -> str:
    cost = row.peak_bytes if memory else row.time_s
    text = "" if cost is None else format_bytes(int(cost)) if memory else format_seconds(cost)
    return text if gain is None else f"{text} · {format_ratio(gain)}"
