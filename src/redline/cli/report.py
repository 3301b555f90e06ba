"""`redline report`: writes a measurement file as a page."""

from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from redline.cli.console import print_json, results
from redline.cli.signals import uninterrupted_imports


def report(
    file: Annotated[Path, typer.Argument(help="A measurement file (JSON lines) written by `redline climb`.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The HTML file to write (default: FILE with the suffix .html)."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the report as Markdown.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the ladder as an SVG image, for a README.")] = None,
    run: Annotated[
        str | None,
        typer.Option(help="The id of the run, or its start, if FILE contains several (default: the latest)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the written paths and the rows as JSON.")] = False,
) -> None:
    """Write the measurements of a climb as one HTML page, with the ladder, the plots and the reasons.

    Needs neither a GPU nor the model, so the file may come from another machine.

    Example: [bold]redline report climb.jsonl -o report.html --markdown report.md[/]
    """
    with uninterrupted_imports():
        from redline.ladder.measurement import load_measurements
        from redline.ladder.report import ladder_rows, write_report
    page = output or file.with_suffix(".html")
    climb = write_report(load_measurements(file), page, markdown, path_svg=svg, run=run)
    if as_json:
        rows = ladder_rows([entry.measurement for entry in climb.entries])
        print_json(
            {
                "html": str(page),
                "markdown": str(markdown) if markdown else None,
                "svg": str(svg) if svg else None,
                "run": climb.subject.run,
                "workload": climb.subject.workload,
                "headline": climb.headline(),
                "rows": [_finite(asdict(row)) for row in rows],
            }
        )
        return
    results.print(escape(climb.headline()), highlight=False, soft_wrap=True)
    for path in (page, markdown, svg):
        if path is not None:
            results.print(f"wrote [bold]{escape(str(path))}[/]", highlight=False, soft_wrap=True)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
