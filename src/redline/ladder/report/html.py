"""Renders the report as one HTML page."""

from dataclasses import replace

from redline.ladder.report.charts import draw_all
from redline.ladder.report.climb import Climb, format_ratio, interleaved_eager_s
from redline.ladder.report.ladder import load_sentence, score_name, score_text, time_name, worst_score
from redline.ladder.report.plan_text import plan_toml, python_lines
from redline.ladder.report.tables import (
    Table,
    all_tables,
    columns_with_values,
    final_over_start,
    format_count,
    format_date,
)
from redline.notation import format_bytes, format_seconds
from redline.pages import Tile, render_page

_TONES = dict.fromkeys(("kept", "passed"), "good") | dict.fromkeys(("refused", "failed"), "bad")


def render_html(climb: Climb) -> str:
    result = climb.result or climb.baseline or climb.entries[0]
    return render_page(
        "redline.ladder.report",
        "report.html.jinja",
        climb=climb,
        subject=climb.subject,
        machine=climb.machine.name,
        date=format_date(climb.subject.created),
        headline=climb.headline(),
        warning=load_sentence([entry.measurement for entry in climb.entries]),
        tiles=_tiles(climb),
        charts=draw_all(climb),
        tables={table.name: _without_empty(table) for table in all_tables(climb)},
        tones=_TONES,
        plan=result.row.plan,
        toml=plan_toml(result.row.plan, climb.subject.objective),
        python=python_lines(climb.subject.training),
        memory=climb.subject.objective == "memory",
        time_name=time_name(climb.subject),
        statistics="99th percentiles" if climb.subject.is_tail else "medians",
    )


def _tiles(climb: Climb) -> list[Tile]:
    result, baseline = climb.result or climb.baseline, climb.baseline
    if result is None or not result.timed:
        return []
    row, m = result.row, result.measurement
    before = baseline.row if baseline is not None and baseline is not result else None
    tiles = []
    if before is not None and row.over_start is not None:
        interval = final_over_start(climb)
        wide = interval is not None and interval.low > 0
        note = f"{interval.low:.2f}–{interval.high:.2f}× at 99%" if interval and wide else "over the original model"
        tiles.append(Tile("Speed-up", format_ratio(row.over_start), note))
    if climb.over_compiled is not None:
        mode = climb.compiled.label.partition("(")[2].rstrip(")") if climb.compiled else ""
        note = f"its best mode: {mode or 'default'}"
        tiles.append(Tile("Over torch.compile", format_ratio(climb.over_compiled), note))
    elif not climb.has_compiled:
        tiles.append(Tile("Over torch.compile", "not measured"))
    eager_s = interleaved_eager_s(climb) if before is not None else None
    was = f"from {format_seconds(eager_s)}" if eager_s else "original model"
    if m.callers:
        was = f"from {format_count(1 / eager_s)}" if eager_s else "original model"
        tiles.append(Tile("Requests per second", format_count(m.requests_per_s()), f"{was}, {m.callers} callers"))
    else:
        calls = f", {row.calls:,} calls" if row.calls else ""
        tiles.append(Tile(time_name(m), format_seconds(row.time_s or float("nan")), was + calls))
    if (m.items or m.unit != "call") and not m.is_tail and not (m.callers and m.unit == "call"):
        old = f"from {format_count(m.throughput() * m.median_s() / eager_s)}" if eager_s else "original model"
        tiles.append(Tile(f"{m.unit.capitalize()}s per second", format_count(m.throughput()), old))
    if row.peak_bytes:
        was = f"from {format_bytes(before.peak_bytes)}" if before and before.peak_bytes else "original model"
        tiles.append(Tile("Peak memory", format_bytes(row.peak_bytes), was))
    worst = worst_score(m.scores)
    if worst is not None:
        tiles.append(Tile("Closest gate", score_text(worst).split()[0], f"{score_name(worst)}, limit {worst.limit:g}"))
    if row.share is not None:
        tiles.append(Tile("Of the roofline", f"{row.share:.0%}", f"in {m.precision}, on this machine"))
    return tiles


def _without_empty(table: Table) -> Table:
    shown = columns_with_values(table)
    rows = tuple(tuple(row[i] for i in shown) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in shown), rows=rows)
