"""Self-contained HTML pages: one base template, one style sheet, nothing loaded from elsewhere.

An application keeps a body template that extends `base.html.jinja` and renders it with `render_page`. The macros that
several pages share (tiles, chart cards, tables) are in `parts.html.jinja`.
"""

from redline.pages.render import CURVE_COLORS, ChartCard, TextTable, Tile, render_page, render_text

__all__ = ["CURVE_COLORS", "ChartCard", "TextTable", "Tile", "render_page", "render_text"]
