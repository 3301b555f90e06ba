"""Serves the static files of the chat page, if they are installed, with a strict Content-Security-Policy."""

from importlib.resources import files

from aiohttp import web

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
}


def read_page() -> dict[str, tuple[bytes, str]]:
    """Returns a dict from URL path to content and media type. index.html is at `/`. Empty if no page is installed."""
    folder = files("redline.serving") / "page"
    found: dict[str, tuple[bytes, str]] = {}
    if folder.is_dir():
        for file in folder.iterdir():
            suffix = file.name.rpartition(".")[2]
            if suffix in _TYPES:
                path = "/" if file.name == "index.html" else f"/{file.name}"
                found[path] = (file.read_bytes(), _TYPES[suffix])
    return found


def add_page(app: web.Application) -> frozenset[str]:
    """Adds the page's files to an application, and returns their URL paths, which need no API key."""
    page = read_page()
    for path, (content, kind) in page.items():

        async def serve(request: web.Request, content: bytes = content, kind: str = kind) -> web.Response:
            return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

        app.router.add_get(path, serve)
    return frozenset(page)
