"""Reports of a climb: HTML to look at, Markdown to paste, and the ladder as an SVG image.

A report needs only the measurement file: no GPU, no model and no rung.
"""

from collections.abc import Sequence
from pathlib import Path

from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement
from redline.ladder.report.climb import Climb, choose_run
from redline.ladder.report.front import Point, pareto_front
from redline.ladder.report.html import render_html
from redline.ladder.report.ladder import Row, ladder_rows
from redline.ladder.report.ladder_svg import climb_svg
from redline.ladder.report.markdown import render_markdown

__all__ = [
    "Climb",
    "Point",
    "Row",
    "choose_run",
    "climb_svg",
    "ladder_rows",
    "pareto_front",
    "render_html",
    "render_markdown",
    "write_report",
]


def write_report(
    measurements: Sequence[Measurement],
    path_html: Path,
    path_md: Path | None = None,
    *,
    path_svg: Path | None = None,
    run: str | None = None,
) -> Climb:
    """Writes the report of one climb and returns that climb.

    Args:
        measurements: the measurements of one or several climbs.
        path_html: the HTML page to write.
        path_md: also writes the report as Markdown.
        path_svg: also writes the ladder as a standalone SVG image.
        run: the id of the climb, or an unambiguous prefix of it; the latest climb by default.
    """
    climb = Climb.of(choose_run(measurements, run))
    write_text(path_html, render_html(climb))
    if path_md is not None:
        write_text(path_md, render_markdown(climb))
    if path_svg is not None:
        write_text(path_svg, climb_svg(climb))
    return climb
