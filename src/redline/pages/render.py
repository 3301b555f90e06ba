"""Renders a template into one self-contained HTML file. Defines the data types that `parts.html.jinja` shows."""

from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from redline.machine.version import VERSION
from redline.notation import format_bytes, format_rate, format_seconds

_FILTERS = {
    "seconds": format_seconds,
    "bytes": format_bytes,
    "flop_rate": lambda value: format_rate(value, "FLOP/s"),
    "percent": lambda share: f"{share:.1%}",
}

# Number of curve colors in the style sheet: the classes c0 to c5.
CURVE_COLORS = 6


def render_page(package: str, template: str, **context: Any) -> str:
    """Returns the HTML of `template`, a file in `package` (such as `redline.stream`) that extends `base.html.jinja`.

    Every value in `context` is escaped unless it is `Markup`; an undefined name raises. The page declares a content
    security policy that forbids any request.
    """
    return _environment(package).get_template(template).render(css=style_sheet(), version=VERSION, **context)


def render_text(package: str, template: str, **context: Any) -> str:
    """Returns the text of a Markdown template, `*.md.jinja`, in which nothing is escaped."""
    return _environment(package).get_template(template).render(context) + "\n"


def read_resource(package: str, name: str) -> Markup:
    """Returns a text file of a package (a script, for example) to be inserted unescaped."""
    return Markup(files(package).joinpath(name).read_text(encoding="utf-8"))


@cache
def style_sheet() -> Markup:
    """Returns the style sheet that all reports share."""
    return read_resource("redline.pages", "base.css") + read_resource("redline.pages", "page.css")


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("redline.pages", ".")]),
        autoescape=lambda name: not str(name).endswith(".md.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= _FILTERS
    return environment


class Tile(NamedTuple):
    """A number at the top of a page, with a caption."""

    name: str
    value: str
    note: str = ""


class ChartCard(NamedTuple):
    """A chart in a separate card; `legend` holds (color class, name) pairs."""

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
