"""Renders the result of a climb as a small HTML table for a notebook."""

from collections.abc import Sequence
from html import escape

from redline.ladder.measurement import Measurement
from redline.ladder.report.climb import UNTRIED, Climb
from redline.notation import format_bytes, format_seconds

_COLUMNS = ("rung", "time per step", "× start", "peak memory", "verdict", "reason")


def render_notebook(measurements: Sequence[Measurement]) -> str:
    """Returns the headline of a climb, its plan, and a row for each rung that was tried."""
    climb = Climb.of(measurements)
    lines = [
        f"<p><b>{escape(climb.headline())}</b><br>plan: <code>{escape(climb.subject.plan)}</code></p>",
        "<table><thead><tr>",
        *(f"<th>{column}</th>" for column in _COLUMNS),
        "</tr></thead><tbody>",
    ]
    for entry in climb.entries:
        row = entry.row
        if row.verdict in UNTRIED:
            continue
        cells = (
            entry.label,
            format_seconds(row.time_s) if row.time_s is not None else "",
            f"{row.over_start:.2f}" if row.over_start is not None else "",
            format_bytes(row.peak_bytes) if row.peak_bytes else "",
            row.verdict,
            row.reason,
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])
