"""`redline report`: writes a measurement file as a page."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import print_json, results
from redline.cli.options import AsJson
from redline.cli.signals import uninterrupted_imports


def report(
    file: Annotated[Path, Argument(help="A measurement file (JSON lines) written by `redline climb`.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="The HTML file to write (default: FILE with the suffix .html).")
    ] = None,
    markdown: Annotated[Path | None, Option(help="Also write the report as Markdown.")] = None,
    svg: Annotated[Path | None, Option(help="Also write the ladder as an SVG image, for a README.")] = None,
    run: Annotated[
        str | None,
        Option(help="The id of the run, or its first characters, if FILE contains several (default: the latest)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the measurements of a climb as one HTML page, with the ladder, the plots and the reasons.

    Needs neither a GPU nor the model, so the file may come from another machine.

    Example: [bold]redline report climb.jsonl -o report.html --markdown report.md[/]
    """
    with uninterrupted_imports():
        from redline import report as write_report
    page = output or file.with_suffix(".html")
    climb = write_report(file, page, markdown=markdown, svg=svg, run=run)
    if as_json:
        print_json(
            {
                "html": str(page),
                "markdown": str(markdown) if markdown else None,
                "svg": str(svg) if svg else None,
                "run": climb.subject.run,
                "workload": climb.subject.workload,
                "headline": climb.headline(),
                "front": [asdict(point) for point in climb.front],
                "rows": [asdict(entry.row) for entry in climb.entries],
            }
        )
        return
    results.print(escape(climb.headline()), soft_wrap=True)
    for path in (page, markdown, svg):
        if path is not None:
            results.print(f"wrote [bold]{escape(str(path))}[/]", soft_wrap=True)
