"""Renders the result of a climb as a small HTML table for a notebook."""

from collections.abc import Sequence
from html import escape

from redline.ladder.measurement import Measurement
from redline.ladder.report.climb import Climb
from redline.ladder.report.tables import NONE, ladder_table

# Columns of the report that a notebook has no room for.
_OMITTED = ("Calls", "Last plan", "Over last", "Quality", "Of the roofline", "Set-up", "Break-even")


def render_notebook(measurements: Sequence[Measurement]) -> str:
    """Returns the headline of a climb, its plan, and a row for each rung that was tried."""
    climb = Climb.of(measurements)
    table = ladder_table(climb)
    shown = [i for i, column in enumerate(table.columns) if column not in _OMITTED]
    lines = [
        f"<p><b>{escape(climb.headline())}</b><br>plan: <code>{escape(climb.subject.plan)}</code></p>",
        "<table><thead><tr>",
        *(f"<th>{column}</th>" for column in (*(table.columns[i] for i in shown), "Reason")),
        "</tr></thead><tbody>",
    ]
    for row, why in zip(table.rows, table.why, strict=True):
        cells = [row[i].partition("\n")[0].replace(NONE, "") for i in shown]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, why)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])
