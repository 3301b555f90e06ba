"""Writes every table of the committed results as HTML: climbs.html and models.html in a folder.

    python benchmarks/full_tables.py [--out redline-out/tables]

docs/results.md, docs/transformer-results.md and docs/stream-results.md are the short forms.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import model_tables
import tables
from markdown_it import MarkdownIt

from redline.files.atomic import write_text
from redline.pages.render import style_sheet

ROOT = Path(__file__).resolve().parents[1]
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>{css}
td, th {{ padding: 2px 10px; text-align: left; vertical-align: top; }}</style></head>
<body><main>
{body}
</main></body>
</html>
"""


def html_page(markdown: str, source: Path) -> str:
    """Returns a self-contained page. Links, which `markdown` writes relative to `source`, point into the repository."""
    body = MarkdownIt("commonmark").enable("table").render(markdown)
    folder = source.parent.resolve().as_uri()
    body = body.replace('href="../', f'href="{folder}/../')
    return _PAGE.format(title=markdown.splitlines()[0].lstrip("# "), css=style_sheet(), body=body)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes every table of the committed results as HTML.")
    parser.add_argument("--out", type=Path, default=root / "redline-out" / "tables", help="the folder to write to")
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"climbs.html": tables.full_page(tables.find_results(root)), "models.html": model_tables.full_page(root)}
    for name, markdown in pages.items():
        write_text(folder / name, html_page(markdown, root / "docs" / name))
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
