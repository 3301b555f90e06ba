"""Renders the report as GitHub Markdown: the headline, the plan and all tables."""

import re

from redline.ladder.report.climb import Climb
from redline.ladder.report.ladder import load_sentence
from redline.ladder.report.plan_text import plan_toml, python_lines
from redline.ladder.report.tables import Table, all_tables, columns_with_values, format_date

_SPECIAL = re.compile(r"([\\`*_{}\[\]|~#$!])")


def render_markdown(climb: Climb) -> str:
    m = climb.subject
    result = climb.result or climb.baseline or climb.entries[0]
    kind = " · training step" if m.training else ""
    parts = [
        f"# {escape(m.workload)} on {escape(climb.machine.name)}",
        f"**{escape(climb.headline())}**",
        *([escape(warning)] if (warning := load_sentence([e.measurement for e in climb.entries])) else []),
        f"{format_date(m.created)}{kind} · objective: {escape(m.objective)}",
        "## The plan",
        fenced(result.row.plan),
        fenced(plan_toml(result.row.plan, climb.subject.objective), "toml"),
        fenced(python_lines(m.training), "python"),
    ]
    for table in all_tables(climb):
        parts += [f"## {escape(table.title)}", markdown_table(table)]
        parts += [f"<sub>{escape(table.note)}</sub>"] if table.note else []
    parts.append(f"<sub>Made by Redline {escape(m.redline)} from {len(climb.entries)} measurements.</sub>")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Escapes text so that it contains no HTML tag, emphasis, link or table cell."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", text)


def fenced(text: str, language: str = "") -> str:
    """Returns a code block with a fence longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def markdown_table(table: Table) -> str:
    """Returns a table of the report without its empty columns."""
    shown = columns_with_values(table)
    columns = [table.columns[i] for i in shown] + (["Reason"] if table.why else [])
    aligned = ["---" if i < table.words else "---:" for i in shown] + (["---"] if table.why else [])
    lines = [[escape(column) for column in columns], aligned]
    for index, row in enumerate(table.rows):
        cells = [_flat(row[i]) for i in shown] + ([table.why[index]] if table.why else [])
        lines.append([escape(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flat(cell: str) -> str:
    value, _, small = cell.partition("\n")
    return f"{value} ({small})" if small else value
