"""Measurements in, pages out: HTML to look at, Markdown to paste. Needs no GPU, no model and no rung."""

from collections.abc import Sequence
from pathlib import Path

from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement
from redline.ladder.report.climb import Climb, choose_run
from redline.ladder.report.html import render_html
from redline.ladder.report.ladder import Row, ladder_rows
from redline.ladder.report.markdown import render_markdown

__all__ = ["Climb", "Row", "choose_run", "ladder_rows", "render_html", "render_markdown", "write_report"]


def write_report(
    measurements: Sequence[Measurement],
    path_html: Path,
    path_md: Path | None = None,
    *,
    run: str | None = None,
) -> Climb:
    """Writes the report of one climb, the latest unless `run` names another, and returns that climb."""
    climb = Climb.of(choose_run(measurements, run))
    write_text(path_html, render_html(climb))
    if path_md is not None:
        write_text(path_md, render_markdown(climb))
    return climb
