"""Reports of a climb: HTML to look at, Markdown to paste, and the ladder as an SVG image.

A report needs only the measurement file: no GPU, no model and no rung.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement, load_measurements
from redline.ladder.report.climb import Climb, choose_run
from redline.ladder.report.front import Point, pareto_front
from redline.ladder.report.html import render_html
from redline.ladder.report.ladder import ladder_rows
from redline.ladder.report.ladder_svg import climb_svg
from redline.ladder.report.markdown import render_markdown

__all__ = [
    "Climb",
    "Point",
    "choose_run",
    "climb_svg",
    "ladder_rows",
    "pareto_front",
    "render_html",
    "render_markdown",
    "report",
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


def report(
    file: str | os.PathLike[str],
    page: str | os.PathLike[str] | None = None,
    *,
    markdown: str | os.PathLike[str] | None = None,
    svg: str | os.PathLike[str] | None = None,
    run: str | None = None,
) -> Climb:
    """Writes the report of a measurement file, and returns the climb as data. Needs neither a GPU nor the model.

    Args:
        file: A measurement file (JSON lines) of a climb, also of an interrupted one, or of another machine.
        page: The HTML page to write; by default `file` with the suffix .html.
        markdown: Also write the report as Markdown to this file.
        svg: Also write the ladder as a standalone SVG image to this file.
        run: The id of a run, or an unambiguous prefix of it, if the file has several; by default the latest.

    >>> climb = report("climb.jsonl", "report.html", svg="ladder.svg")
    >>> climb.headline()
    '4.94× faster than eager, 2.97× faster than torch.compile, 43% less memory, within all gates.'
    >>> climb.front[0].name, climb.front[0].plan
    ('fastest', 'sdpa + bf16 + channels_last + compile(mode=max-autotune) + cuda_graph')
    """
    html, md, image = (None if path is None else Path(path) for path in (page, markdown, svg))
    return write_report(load_measurements(file), html or Path(file).with_suffix(".html"), md, path_svg=image, run=run)
