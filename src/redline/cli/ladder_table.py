"""The ladder as a Rich table, from the same rows that the report is made of."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from redline.measurement import Measurement
from redline.quantities import format_bytes, format_seconds
from redline.report.ladder import Row, ladder_rows

_COLOURS = {"kept": "green", "baseline": "cyan", "dropped": "dim", "refused": "red", "failed": "red"}


def ladder_table(measurements: Sequence[Measurement], title: str = "") -> Table:
    table = Table(title=title or None, box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.add_column("rung", overflow="fold", min_width=10)
    for name in ("median", "99% interval", "× last", "× start", "peak", "roofline", "set-up", "pays after"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("quality", overflow="fold", max_width=26)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reason", overflow="fold", min_width=20)
    for row in ladder_rows(measurements):
        table.add_row(*_cells(row), style="dim" if row.verdict in ("unavailable", "unmeasured") else "")
    return table


def _cells(row: Row) -> list[str]:
    rung, plan = escape(row.rung), escape(row.plan)
    name = {"baseline": "eager", "compile": f"eager + {rung}", "ablation": f"− {rung}"}.get(row.role, rung)
    if row.role == "final":
        name = f"[bold]final: {plan}[/]" if row.verdict == "kept" else f"race: {plan}"
    elif row.role == "second look":
        name = f"{rung} (again)"
    colour = _COLOURS.get(row.verdict, "dim")
    interval = ""
    if row.low_s is not None and row.high_s is not None:
        interval = f"{format_seconds(row.low_s)}–{format_seconds(row.high_s)}"
    return [
        name,
        format_seconds(row.median_s) if row.median_s is not None else "",
        interval,
        f"{row.over_last.middle:.2f}" if row.over_last is not None else "",
        f"{row.over_start:.2f}" if row.over_start is not None else "",
        format_bytes(row.peak_bytes) if row.peak_bytes else "",
        f"{row.share:.0%}" if row.share is not None else "",
        (format_seconds(row.setup_s) + (" (cached)" if row.setup_cached else "")) if row.setup_s is not None else "",
        f"{row.break_even:,.0f} calls" if row.break_even is not None else "",
        escape(row.quality),
        f"[{colour}]{row.verdict}[/]",
        escape(row.reason),
    ]
