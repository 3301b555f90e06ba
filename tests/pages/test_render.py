"""The page renderer: shared style sheet, escaping, and errors for names that a template does not get."""

import pytest
from jinja2 import UndefinedError

from redline.pages import ChartCard, render_page
from redline.pages.render import read_resource, style_sheet

RECALL = ("redline.evaluation.recall", "page.html.jinja")


def test_page_is_complete_and_escapes_its_values():
    page = render_page(*RECALL, name="<b>", meta="m", headline="h", charts=[], tables=[])
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert str(style_sheet()) in page and "default-src 'none'" in page
    assert "<b>" not in page and "&lt;b&gt; · Redline recall" in page
    assert "script-src" not in page


def test_undefined_names_raise():
    with pytest.raises(UndefinedError, match="charts"):
        render_page(*RECALL, name="n", meta="m", headline="h", tables=[])


def test_chart_cards_show_a_legend_only_if_there_is_one():
    drawing = read_resource("redline.pages", "page.css")
    cards = [ChartCard("one", "note", drawing), ChartCard("two", "note", drawing, (("c0", "first"),))]
    page = render_page(*RECALL, name="n", meta="m", headline="h", charts=cards, tables=[])
    assert page.count('<ul class="legend">') == 1 and '<i class="line c0"></i>first' in page


def test_style_sheet_has_a_dark_theme_and_loads_nothing():
    sheet = str(style_sheet())
    assert "prefers-color-scheme: dark" in sheet and "url(" not in sheet and "@import" not in sheet
