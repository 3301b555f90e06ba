"""The page's files: nothing inline, nothing from other hosts, the colors of the other pages."""

import re

from redline.pages.render import style_sheet
from serving.page.page_files import page_files

FILES = {path: file.content.decode() for path, file in page_files().items()}


def test_every_file_that_is_named_is_served() -> None:
    assert set(FILES) == {"/", "/style.css", "/icon.svg", *(path for path in FILES if path.endswith(".js"))}
    named = re.findall(r'(?:src|href)="([^"]+)"', FILES["/"])
    for text in FILES.values():
        named += re.findall(r'from "\./([^"]+)"', text)
    assert {f"/{name}" for name in named} == set(FILES) - {"/"}
    assert page_files()["/"].content_type == "text/html" and page_files()["/app.js"].content_type == "text/javascript"


def test_nothing_is_inline_or_from_another_host() -> None:
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", FILES["/"])
    for path, text in FILES.items():
        # The names of namespaces are not loaded.
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[a-z]", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path


def test_the_colors_are_those_of_the_other_pages() -> None:
    base = str(style_sheet()).partition("* { box-sizing")[0]
    light, dark = (dict(re.findall(r"(--[\w-]+): (#\w+);", part)) for part in base.split("@media"))
    ours = re.findall(r"(--[\w-]+): light-dark\((#\w+), (#\w+)\)", FILES["/style.css"])
    shared = {name: (one, other) for name, one, other in ours if name in light}
    assert len(shared) >= 13 and shared == {name: (light[name], dark[name]) for name in shared}
