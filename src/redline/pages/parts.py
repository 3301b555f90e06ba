"""The data behind the macros in `parts.html.jinja`."""

from typing import NamedTuple

from markupsafe import Markup

# Number of curve colors in the style sheet: the classes c0 to c5.
CURVE_COLORS = 6


class Tile(NamedTuple):
    """A figure at the top of a page, with its small print."""

    name: str
    value: str
    note: str = ""


class ChartCard(NamedTuple):
    """A chart in a card of its own; `legend` holds (color class, name) pairs."""

    title: str
    note: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...] = ()


class TextTable(NamedTuple):
    """A table whose first `words` columns are text, aligned left; the other columns are numbers, aligned right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
