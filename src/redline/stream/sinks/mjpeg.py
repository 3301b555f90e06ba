"""Serves Motion JPEG over HTTP, as a page and as a stream that browsers, players and recorders can open.

A frame is encoded once, and only while there are viewers. A new viewer first gets the next frame, because the last
encoded frame may be old. A viewer gets the newest frame whenever the previous one has been sent: a slow viewer gets
fewer frames, a viewer that stops reading is disconnected, and the stream waits for neither.
"""

import asyncio
import io
from contextlib import suppress
from urllib.parse import quote

from aiohttp import web

from redline.stream.frames import Frame, as_square_pixels
from redline.stream.sinks import Sink
from redline.web.access import Access, listen, urls
from redline.web.server import Handler, WebServer

PORT, MAX_VIEWERS = 8182, 8
_STREAM = "/stream.mjpeg"
_BOUNDARY = "redline-frame"
_QUALITY = 85
# A viewer that accepts no data for this long is disconnected.
_SEND_TIMEOUT_S = 10.0
# How often a viewer's connection is checked while there is nothing to send.
_CHECK_S = 1.0
# At the end of the stream, all viewers together have this long to receive the last frame.
_CLOSE_S = 1.0
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Redline stream</title>
<style>body{margin:0;background:#111;display:grid;place-items:center;min-height:100vh}
img{max-width:100%;max-height:100vh}</style><img src="/stream.mjpegQUERY" alt="The stream">"""


class MjpegSink(Sink):
    """Serves frames. `urls` are the addresses of the stream (`url` is the first), then those of a page that shows it.

    A host that other machines can reach needs a `key`, which is then part of the addresses.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = PORT, key: str | None = None) -> None:
        self._access = Access(host, key)
        listener = listen(host, port)
        self.port = int(listener.getsockname()[1])
        self.urls = tuple(url for path in (_STREAM, "/") for url in urls("http", host, self.port, path, key))
        self.url = self.urls[0]
        self.name = f"mjpeg at port {self.port}"
        # The newest image for each viewer; empty bytes end the stream. Used only in the server's thread.
        self._viewers: set[asyncio.Queue[bytes]] = set()
        app = web.Application(middlewares=[self._check])
        app.on_response_prepare.append(self._add_headers)
        app.router.add_get("/", self._page)
        app.router.add_get(_STREAM, self._stream)
        self._server = WebServer(app, listener, self._work)
        self._server.start()

    def write(self, frame: Frame) -> None:
        if self._viewers and self._server.loop is not None:
            data = io.BytesIO()
            as_square_pixels(frame).save(data, "jpeg", quality=_QUALITY)
            self._server.loop.call_soon_threadsafe(self._publish, data.getvalue())

    def close(self, complete: bool = True) -> None:
        self._server.close()

    def _publish(self, image: bytes) -> None:
        for images in self._viewers:
            if images.qsize():
                images.get_nowait()
            images.put_nowait(image)

    async def _work(self) -> None:
        await self._server.stop.wait()
        for images in self._viewers:
            images.put_nowait(b"")
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._viewers:
                    await asyncio.sleep(0.01)

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        reason = self._why_not(request)
        return web.Response(status=403, text=reason) if reason else await handler(request)

    def _why_not(self, request: web.Request) -> str:
        """Returns why the request is refused, or an empty string.

        Any web site can embed images from 127.0.0.1, but browsers report this in the header Sec-Fetch-Site.
        """
        if self._access.key is not None:
            return self._access.why_not_key(request.query.get("key"), None)
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "other web sites may not embed this stream."
        return self._access.why_not_host(request.headers.get("Host"))

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update({"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"})

    async def _page(self, request: web.Request) -> web.Response:
        key = self._access.key
        text = _PAGE.replace("QUERY", f"?key={quote(key, safe='')}" if key else "")
        return web.Response(text=text, content_type="text/html")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        kind = f"multipart/x-mixed-replace; boundary={_BOUNDARY}"
        answer = _Multipart(headers={"Cache-Control": "no-store", "Content-Type": kind})
        answer.force_close()
        if request.method == "HEAD":  # players first query the content type
            return answer
        if len(self._viewers) >= MAX_VIEWERS:
            return web.Response(status=503, text="Too many viewers.")
        images = asyncio.Queue[bytes]()
        self._viewers.add(images)
        self._server.release(request)
        assert request.transport is not None
        try:
            await answer.prepare(request)
            while image := await _next_image(images, request.transport):
                head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await answer.write(head.encode() + image + b"\r\n")
        except (OSError, asyncio.CancelledError) as error:
            request.transport.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._viewers.discard(images)
        return answer


async def _next_image(images: asyncio.Queue[bytes], transport: asyncio.BaseTransport) -> bytes:
    """Returns the next image; empty bytes at the end of the stream, or when the viewer has disconnected."""
    while not transport.is_closing():
        with suppress(TimeoutError):
            return await asyncio.wait_for(images.get(), _CHECK_S)
    return b""


class _Multipart(web.StreamResponse):
    """A response without Content-Length. Not chunked either, because some players do not support chunked encoding."""

    _length_check = False
