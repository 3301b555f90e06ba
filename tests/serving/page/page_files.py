"""The files of the page by their paths on a server, and the policy that they have to work under."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}


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
