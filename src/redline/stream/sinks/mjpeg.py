"""Serves Motion JPEG over HTTP, as a page and as a stream that browsers, players and recorders can open.

A frame is encoded once, and only while there are viewers. A new viewer first gets the next frame, because the last
encoded one may be old. Each viewer has a thread that sends the newest frame when the previous one is sent: a slow
viewer gets fewer frames, a dead one is disconnected, and the stream waits for none of them.
"""

import io
import selectors
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from redline.stream.access import REQUEST_S, Access, PendingConnections, listening, urls
from redline.stream.frames import Frame, as_square_pixels
from redline.stream.sinks import Sink

PORT, MAX_VIEWERS = 8182, 8
_STREAM = "/stream.mjpeg"
_BOUNDARY = "redline-frame"
_QUALITY = 85
# A viewer that accepts no data for this long is disconnected.
_SEND_TIMEOUT_S = 10.0
# How often a viewer's connection is checked while there is nothing to send.
_CHECK_S = 1.0
# How long all viewers together may take to receive the last frame.
_CLOSE_S = 1.0
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Redline stream</title>
<style>body{margin:0;background:#111;display:grid;place-items:center;min-height:100vh}
img{max-width:100%;max-height:100vh}</style><img src="/stream.mjpegQUERY" alt="The stream">"""


class MjpegSink(Sink):
    """`urls` are the addresses of the stream (`url` is the first), then those of a page that shows it.

    A host that other machines can reach needs a `key`, which is then part of the addresses.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = PORT, key: str | None = None) -> None:
        self._latest = _Latest()
        access = Access(host, key)
        with listening(host, port):
            self._server = _Server(host, port, access, self._latest)
        self.port = int(self._server.server_address[1])
        self.urls = tuple(url for path in (_STREAM, "/") for url in urls("http", host, self.port, path, key))
        self.url = self.urls[0]
        self.name = f"mjpeg at port {self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def write(self, frame: Frame) -> None:
        if self._latest.is_wanted:
            data = io.BytesIO()
            as_square_pixels(frame).save(data, "jpeg", quality=_QUALITY)
            self._latest.put(data.getvalue())

    def close(self, complete: bool = True) -> None:
        self._latest.close()
        self._server.shutdown()
        self._thread.join()
        self._server.end_viewers()
        self._server.server_close()


class _Latest:
    """The newest encoded frame, and the number of viewers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._image, self._number, self._viewers, self.is_closed = b"", 0, 0, False

    @property
    def is_wanted(self) -> bool:
        return self._viewers > 0

    def put(self, image: bytes) -> None:
        with self._changed:
            self._image, self._number = image, self._number + 1
            self._changed.notify_all()

    def after(self, number: int, limit_s: float) -> tuple[bytes, int] | None:
        """Waits for an image with a higher number. Returns an empty image after the end, and None after `limit_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number > number or self.is_closed, limit_s):
                return None
            return (self._image if self._number > number else b""), self._number

    def add_viewer(self) -> int:
        """Returns the number of the current image; the viewer gets later ones."""
        with self._changed:
            self._viewers += 1
            return self._number

    def remove_viewer(self) -> None:
        with self._changed:
            self._viewers -= 1

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # `end_viewers` joins the threads of viewers, after it has shut down their sockets.
    block_on_close = False
    # When this many connections wait to be accepted, the system refuses others for a second.
    request_queue_size = 128

    def __init__(self, host: str, port: int, access: Access, latest: _Latest) -> None:
        self.access, self.latest, self.viewer_slots = access, latest, threading.BoundedSemaphore(MAX_VIEWERS)
        self._viewers: dict[threading.Thread, socket.socket] = {}
        self.pending = PendingConnections[socket.socket]()
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Viewer)

    def process_request(self, request: Any, client_address: Any) -> None:
        ended = self.pending.add(request, client_address[0])
        if ended is not None:
            with suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._viewers[threading.current_thread()] = request
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.pending.remove(request)
            self._viewers.pop(threading.current_thread(), None)

    def end_viewers(self) -> None:
        viewers, end_s = list(self._viewers.items()), time.monotonic() + _CLOSE_S
        for thread, _ in viewers:
            thread.join(max(0.0, end_s - time.monotonic()))
        for thread, connection in viewers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_SEND_TIMEOUT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores viewers that disconnect in the middle of a response."""


class _Request(io.RawIOBase):
    """Reads a request with one deadline; a socket timeout would start again with every byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._deadline_s = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request timed out")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Viewer(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection, REQUEST_S))

    def do_GET(self) -> None:
        server = self.server
        self.connection.settimeout(_SEND_TIMEOUT_S)
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        key = server.access.key
        if reason := self._why_not(url.query):
            # The explanation is escaped; the status line could not hold arbitrary text from the request.
            self.send_error(403, explain=reason)
        elif url.path == "/":
            body = _PAGE.replace("QUERY", f"?key={quote(key, safe='')}" if key else "").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
        elif url.path != _STREAM:
            self.send_error(404)
        elif self.command == "HEAD":
            self._send_stream_headers()
        elif not server.viewer_slots.acquire(blocking=False):
            self.send_error(503, "Too many viewers")
        else:
            server.pending.remove(self.connection)
            number = server.latest.add_viewer()
            try:
                self._send_frames(server.latest, number)
            finally:
                server.latest.remove_viewer()
                server.viewer_slots.release()

    # Players first query the content type with a HEAD request.
    do_HEAD = do_GET

    def _why_not(self, query: str) -> str:
        """Returns why the request is refused, or an empty string.

        Any web site can embed images from 127.0.0.1; the browser then sends Sec-Fetch-Site.
        """
        access = self.server.access
        if access.key is not None:
            return access.why_not_key(parse_qs(query).get("key", [None])[0], None)
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "other web sites may not embed this stream."
        return access.why_not_host(self.headers.get("Host"))

    def _send_stream_headers(self) -> None:
        self.send_response(200)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={_BOUNDARY}")
        self.end_headers()

    def _send_frames(self, latest: _Latest, number: int) -> None:
        self._send_stream_headers()
        while True:
            newer = latest.after(number, _CHECK_S)
            if newer is None and not self._is_disconnected():
                continue
            image, number = newer or (b"", 0)
            if not image:
                return
            head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
            self.wfile.write(head.encode() + image + b"\r\n")

    def _is_disconnected(self) -> bool:
        """Detects disconnected viewers while the source sends nothing, so that they do not occupy all slots."""
        with selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(self.connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        return True

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the request log, which would disturb the live line in the terminal."""
