"""The ladder as a Rich table, from the same rows as the report."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from redline.cli.console import plain_table
from redline.ladder.measurement import Measurement
from redline.ladder.plan import brief
from redline.ladder.report import Point
from redline.ladder.report.ladder import Row, against_s, ladder_rows, load_sentence, shapes_sentence, speedup
from redline.notation import format_bytes, format_seconds

_COLOURS = {"kept": "green", "baseline": "cyan", "dropped": "dim", "refused": "red", "failed": "red"}
_UNTRIED = ("unavailable", "unmeasured")
# Columns on narrow terminals; the report has all columns.
_COMPACT = ("rung", "{time}", "calls", "last", "× last", "× start", "peak", "verdict", "reason")


def ladder_table(measurements: Sequence[Measurement], width: int, title: str = "") -> RenderableType:
    """Returns a table of the rungs that were tried, and a line for each reason why others were not."""
    rows = ladder_rows(measurements)
    column = _time_column(measurements)
    names = list(_cells(rows[0], column)) if width >= 170 or not rows else [n.format(time=column) for n in _COMPACT]
    names = [name for name in names if name != "calls" or column == "p99"]
    table = plain_table(title=title or None, title_justify="left")
    for name in names:
        if name in ("rung", "reason", "quality"):
            table.add_column(name, overflow="fold", ratio=2 if name == "reason" else 1)
        else:
            table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    for row in rows:
        if row.verdict not in _UNTRIED:
            cells = _cells(row, column)
            table.add_row(*(cells[name] for name in names))
    warning = load_sentence(measurements)
    top = [Text(warning, style="yellow")] if warning else []
    return Group(*top, table, *_by_shape(measurements), *_untried(rows))


def front_table(front: Sequence[Point]) -> RenderableType:
    """Returns a table of the Pareto front."""
    table = plain_table(title="Pareto front of speed, memory and quality", title_justify="left")
    for name in ("best at", "× start", "peak", "quality", "plan"):
        if name in ("quality", "plan"):
            table.add_column(name, overflow="fold", ratio=1)
        else:
            table.add_column(name, justify="left" if name == "best at" else "right", no_wrap=True)
    for point in front:
        name = f"[green]{point.name}, the answer[/]" if point.is_answer else point.name
        table.add_row(
            f"{point.number} {name}",
            f"{point.speed.middle:.2f}",
            format_bytes(point.peak_bytes),
            escape(point.quality),
            escape(brief(point.plan)),
        )
    return table


def _format_requests(seconds: float) -> str:
    return f"{1 / seconds:,.4g}"


def _by_shape(measurements: Sequence[Measurement]) -> list[RenderableType]:
    """Returns lines that say which shape the times are for, with the result for each shape if there are several."""
    sentence = shapes_sentence(measurements[0]) if measurements else ""
    if not sentence:
        return []
    parts: list[RenderableType] = [Text(sentence, style="dim")]
    final = next((m for m in measurements if m.role == "final" and m.verdict == "kept" and speedup(m)), None)
    if final is not None and len(final.shapes) > 1:
        table = plain_table("shape", final.against, "final plan", "×")
        for shape in final.shapes:
            before, after = against_s(final, shape) or float("nan"), final.time_s(shape)
            table.add_row(shape, format_seconds(before), format_seconds(after), f"{before / after:.2f}")
        parts += [Text(), table]
    return parts


def _untried(rows: Sequence[Row]) -> list[Text]:
    """Returns the rungs that were not tried, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict in _UNTRIED:
            reasons.setdefault(row.reason, []).append(row.rung)
    return [Text(f"not tried: {', '.join(dict.fromkeys(names))}: {why}", style="dim") for why, names in reasons.items()]


def _name(row: Row) -> str:
    rung, plan = escape(row.rung), escape(row.plan)
    if row.role == "final":
        return f"[bold]final: {plan}[/]" if row.verdict == "kept" else f"race: {plan}"
    return {
        "baseline": "eager",
        "compile": f"eager + {rung}",
        "ablation": f"− {rung}",
        "second look": f"{rung} (again)",
    }.get(row.role, rung)


def _time_column(measurements: Sequence[Measurement]) -> str:
    if measurements and measurements[0].callers:
        return "requests/s"
    return measurements[0].statistic if measurements else "median"


def _cells(row: Row, column: str) -> dict[str, str]:
    colour = _COLOURS.get(row.verdict, "dim")
    write = _format_requests if column == "requests/s" else format_seconds
    interval = ""
    if row.low_s is not None and row.high_s is not None:
        low_s, high_s = (row.high_s, row.low_s) if column == "requests/s" else (row.low_s, row.high_s)
        interval = f"{write(low_s)} – {write(high_s)}"
    setup = format_seconds(row.setup_s) if row.setup_s is not None else ""
    return {
        "rung": _name(row),
        column: write(row.time_s) if row.time_s is not None else "",
        "99% interval": interval,
        "calls": f"{row.calls:,}" if row.calls is not None else "",
        "last": write(row.against_s) if row.against_s is not None else "",
        "× last": f"{row.over_last.middle:.2f}" if row.over_last is not None else "",
        "× start": f"{row.over_start:.2f}" if row.over_start is not None else "",
        "peak": format_bytes(row.peak_bytes) if row.peak_bytes else "",
        "roofline": f"{row.share:.0%}" if row.share is not None else "",
        "set-up": f"{setup} (cached)" if setup and row.setup_cached else setup,
        "pays after": f"{row.break_even:,.0f} calls" if row.break_even is not None else "",
        "quality": escape(row.quality),
        "verdict": f"[{colour}]{row.verdict}[/]",
        "reason": escape(row.reason),
    }
