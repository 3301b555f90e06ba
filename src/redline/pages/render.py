"""Renders a template into one self-contained HTML file."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from redline.notation import format_bytes, format_rate, format_seconds
from redline.version import VERSION

_FILTERS = {
    "seconds": format_seconds,
    "bytes": format_bytes,
    "flop_rate": lambda value: format_rate(value, "FLOP/s"),
    "percent": lambda share: f"{share:.1%}",
}


def render_page(package: str, template: str, **context: Any) -> str:
    """Returns the HTML of `template`, a file in `package` that extends `base.html.jinja`.

    Every value in `context` is escaped unless it is `Markup`; an undefined name raises. The page declares a content
    security policy that forbids any request.

    Args:
        package: the package that contains the template, for example `redline.stream`.
        template: the file name of the template.
        context: the variables of the template. The base template adds `css` and `version`.
    """
    return _environment(package).get_template(template).render(css=style_sheet(), version=VERSION, **context)


def read_resource(package: str, name: str) -> Markup:
    """Returns a text file of a package (a script, for example) to be inserted unescaped."""
    return Markup(files(package).joinpath(name).read_text(encoding="utf-8"))


@cache
def style_sheet() -> Markup:
    """Returns the style sheet that all pages share."""
    return read_resource("redline.pages", "page.css")


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("redline.pages", ".")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= _FILTERS
    return environment
