"""The tables of a climb in the terminal, from the tables of the report."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from redline.cli.console import plain_table
from redline.ladder.measurement import Measurement
from redline.ladder.plan import brief
from redline.ladder.report import Climb
from redline.ladder.report.climb import UNTRIED
from redline.ladder.report.ladder import load_sentence, shapes_sentence
from redline.ladder.report.tables import (
    NONE,
    Table,
    ablation_table,
    columns_with_values,
    front_table,
    ladder_table,
    rejected_table,
    shapes_table,
)

_COLOURS = {"kept": "green", "baseline": "cyan", "dropped": "dim", "removed": "dim", "refused": "red", "failed": "red"}
# Terminals with fewer columns omit these columns of the ladder, and the second lines of cells.
_WIDE = 170
_WIDE_ONLY = ("Quality", "Of the roofline", "Set-up", "Break-even")


def climb_tables(measurements: Sequence[Measurement], width: int, title: str = "") -> RenderableType:
    """Returns the ladder, what each rung is worth, the input shapes, and why other rungs were not tried."""
    climb = Climb.of(measurements)
    warning, sentence, shapes = load_sentence(measurements), shapes_sentence(climb.subject), shapes_table(climb)
    parts: list[RenderableType] = [Text(warning, style="yellow")] if warning else []
    parts.append(_rich_table(ladder_table(climb), width, title))
    if climb.ablations:
        parts += [Text(), _rich_table(ablation_table(climb), width)]
    if sentence:
        parts.append(Text(sentence, style="dim"))
    if shapes is not None:
        parts += [Text(), _rich_table(shapes, width)]
    for rungs, verdict, reason in rejected_table(climb).rows:
        if verdict in UNTRIED:
            parts.append(Text(f"not tried: {rungs}: {reason}", style="dim"))
    return Group(*parts)


def pareto_front_table(measurements: Sequence[Measurement], width: int) -> RenderableType:
    front = front_table(Climb.of(measurements))
    return _rich_table(front, width, front.title)


def _rich_table(table: Table, width: int, title: str = "") -> RichTable:
    is_wide = width >= _WIDE
    shown = [i for i in columns_with_values(table) if is_wide or table.columns[i] not in _WIDE_ONLY]
    made = plain_table(title=title or None, title_justify="left")
    for i in shown:
        words = i < table.words
        made.add_column(table.columns[i], justify="left" if words else "right", overflow="fold", no_wrap=not words)
    if table.why:
        made.add_column("Reason", overflow="fold", ratio=1)
    for row, why in zip(table.rows, table.why or [""] * len(table.rows), strict=True):
        made.add_row(*(_cell(row[i], is_wide) for i in shown), *([escape(why)] if table.why else []))
    return made


def _cell(cell: str, with_second_line: bool) -> str:
    value, _, small = cell.partition("\n")
    if value in _COLOURS:
        return f"[{_COLOURS[value]}]{value}[/]"
    text = "" if value == NONE else escape(brief(value.replace(" *", " (cached)")))
    return f"{text} [dim]{escape(small)}[/]" if small and with_second_line else text
