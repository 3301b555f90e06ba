"""The ladder chart: the cost of a step after each rung, and what the rung saved, as a waterfall."""

from dataclasses import dataclass

from redline.ladder.report.climb import KINDS, TRIED, UNTRIED, Climb, Entry, format_change, format_ratio
from redline.ladder.report.ladder import time_name
from redline.ladder.report.roofline import place
from redline.notation import format_bytes, format_seconds
from redline.pages.svg import Drawing, Scale, text_width


@dataclass(frozen=True)
class _Step:
    label: str
    kind: str
    value: float | None
    before: float | None
    note: str
    tip: str


def draw_ladder(climb: Climb, width: int) -> Drawing | None:
    memory = climb.subject.objective == "memory"
    steps = _steps(climb, memory)
    values = [v for s in steps for v in (s.value, s.before) if v]
    if not values:
        return None
    stacked = width < 480
    row, top = (38, 26) if stacked else (27, 28)
    left = 0 if stacked else min(230, 26 + max(text_width(s.label) for s in steps))
    right = width - (0 if stacked else 14 + max(text_width(s.note) for s in steps))
    # On a narrow page, a row without a bar needs one line instead of two.
    rows = [22 if stacked and step.value is None else row for step in steps]
    height = top + sum(rows) + 6
    what = "Peak memory" if memory else time_name(climb.subject)
    words = "; ".join(f"{step.label} {step.note}" for step in steps)
    drawing = Drawing(width, height, "The ladder", f"{what} after each rung: {words}.")
    scale = Scale(0.0, max(values), left, right)
    _draw_axis(drawing, scale, memory, top)
    lines = _references(climb, scale, memory)
    for index, step in enumerate(steps):
        y = top + sum(rows[:index])
        _draw_step(drawing, step, scale, y, stacked)
        if stacked and step.value is not None:
            for x, kind in lines:
                drawing.line(x, y + 15, x, y + 35, kind)
    for x, kind in () if stacked else lines:
        drawing.line(x, top - 6, x, height - 6, kind)
    return drawing


def _draw_axis(drawing: Drawing, scale: Scale, memory: bool, top: float) -> None:
    # Ticks of sizes are multiples of GiB or MiB.
    size = 2**30 if scale.high >= 2**30 else 2**20
    counted = Scale(0.0, scale.high / size, scale.start, scale.end) if memory else scale
    for tick in counted.ticks(4 if drawing.width < 480 else 7):
        x = counted(tick)
        drawing.line(x, top - 6, x, drawing.height - 6, "grid")
        anchor = "start" if tick == 0 else "end" if x > drawing.width - 30 else "middle"
        text = format_bytes(tick * size) if memory else format_seconds(tick)
        drawing.text(x, top - 12, text if tick else "0", "tick", anchor)


def _references(climb: Climb, scale: Scale, memory: bool) -> list[tuple[float, str]]:
    """Returns the reference lines: torch.compile (dashed) and the lower bound of the machine (red)."""
    compiled = climb.compiled.row if climb.compiled is not None else None
    value = None if compiled is None else compiled.peak_bytes if memory else compiled.time_s
    lines = [(scale(value), "reference")] if value else []
    floor = place(climb.result.measurement) if climb.result and not memory else None
    if floor is not None and floor.floor_s <= scale.high:
        lines.append((scale(floor.floor_s), "limit"))
    return lines


def _draw_step(drawing: Drawing, step: _Step, scale: Scale, y: float, stacked: bool) -> None:
    faint = step.kind == "faint"
    text_y, bar_y, height = (y + 12, y + 18, 14) if stacked else (y + 17, y + 5, 17)
    room = drawing.width - text_width(step.note) - 10 if stacked else scale.start - 14
    drawing.label(0, text_y, step.label, room, "quiet" if faint else "strong")
    drawing.text(drawing.width, text_y, step.note, "quiet" if faint else "figure", "end")
    if step.value is None:
        return
    if faint:
        bar_y, height = bar_y + height / 2 - 2.5, 5
    x = scale(step.value)
    drawing.bar(scale.start, bar_y, x - scale.start, height, f"m-{step.kind}", step.tip)
    if step.before is not None and step.before > step.value and not faint:
        drawing.bar(x, bar_y, scale(step.before) - x, height, "m-cut", step.tip)


def _steps(climb: Climb, memory: bool) -> list[_Step]:
    shown = [climb.baseline, climb.compiled, *climb.tried, climb.final]
    steps, last_bytes = [], None
    first_bytes = climb.baseline.row.peak_bytes if climb.baseline else None
    for entry in shown:
        if entry is None or entry.row.verdict in UNTRIED:
            continue
        steps.append(_step(entry, memory, first_bytes if entry.row.role == "final" else last_bytes))
        if entry.row.role == "baseline" or (entry.row.role in TRIED and entry.row.verdict == "kept"):
            last_bytes = entry.row.peak_bytes
    return steps


def _step(entry: Entry, memory: bool, last_bytes: int | None) -> _Step:
    row, m = entry.row, entry.measurement
    kind = KINDS.get(row.role, "kept" if row.verdict == "kept" else "faint")
    # If a gate failed, neither speed nor memory is shown.
    value = (row.peak_bytes if memory else row.time_s) if entry.timed else None
    before: float | None = None
    if memory:
        before = last_bytes if row.role in (*TRIED, "final") else None
    elif row.role in (*TRIED, "final") and m.shapes and m.against_samples.get(m.shapes[0]):
        before = m.against_s()
    figure = "" if value is None else format_bytes(value) if memory else format_seconds(value)
    ratio = row.over_last.middle if row.over_last and row.role not in ("baseline", "compile") else row.over_start
    gain = f" · {format_ratio(ratio)}" if ratio and row.role != "baseline" else ""
    if memory:
        gain = f" · {format_change(value / before)}" if before and value else ""
    note = f"{figure}{gain}" if kind != "faint" else f"{figure} {row.verdict}".strip()
    second = " (again)" if row.role == "second look" else ""
    plus = "+ " if kind == "kept" else ""
    return _Step(plus + entry.label + second, kind, value, before, note, f"{row.plan}: {row.reason}")
