"""The files of the page by their paths on the server, and the headers that go with them."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # The page of a new version must not run with files of an old one.
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    content: bytes
    content_type: str


@cache
def page_files() -> dict[str, PageFile]:
    """Returns the files by path: `/` is the page, `/app.js` a script."""
    found: dict[str, PageFile] = {}
    for entry in files("redline.serving.page").iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            path = "/" if entry.name == "index.html" else f"/{entry.name}"
            found[path] = PageFile(entry.read_bytes(), _TYPES[suffix])
    return found
