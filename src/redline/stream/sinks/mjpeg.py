"""Motion JPEG over HTTP: a page and a stream that any browser, player or recorder opens.

A frame is encoded once, and only while somebody looks: whoever comes sees the next one first, since the last that was
encoded may be old. Each viewer has a thread that sends the newest frame when the last one is gone: whoever is slow sees
fewer, whoever is dead is given up, and the stream waits for none of them.
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

from redline.errors import RedlineError
from redline.stream.access import Access, urls
from redline.stream.admission import REQUEST_S, WaitingConnections
from redline.stream.frames import Frame
from redline.stream.sinks.square_pixels import as_square_pixels

PORT, MOST_VIEWERS = 8182, 8
_STREAM = "/stream.mjpeg"
_BOUNDARY = "redline-frame"
_QUALITY = 85
# A viewer that takes nothing for so long is dead.
_DEAD_S = 10.0
# So often it is seen whether one is still there while there is nothing to send.
_LOOK_S = 1.0
# At the end all viewers together have so long to take the last picture.
_FAREWELL_S = 1.0
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Redline stream</title>
<style>body{margin:0;background:#111;display:grid;place-items:center;min-height:100vh}
img{max-width:100%;max-height:100vh}</style><img src="/stream.mjpegQUERY" alt="The stream">"""


class MjpegSink:
    """`urls` are the addresses of the stream (`url` is the first), then those of a page that shows it. Another host
    than this machine's own needs a `key`, which is then part of the address."""

    takes_new_size = True

    def __init__(
        self, host: str = "127.0.0.1", port: int = PORT, key: str | None = None, most_viewers: int = MOST_VIEWERS
    ) -> None:
        self._latest = _Latest()
        shared = _Shared(self._latest, Access(host, key), threading.BoundedSemaphore(most_viewers))
        self._server = _listen(host, port, shared)
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

    def close(self, whole: bool = True) -> None:
        self._latest.close()
        self._server.shutdown()
        self._thread.join()
        self._server.end_viewers()
        self._server.server_close()

    def abandon(self) -> None:
        self.close()


class _Latest:
    """The newest picture, for any number of viewers, and how many of them there are."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._picture, self._number, self._viewers, self.is_closed = b"", 0, 0, False

    @property
    def is_wanted(self) -> bool:
        return self._viewers > 0

    def put(self, picture: bytes) -> None:
        with self._changed:
            self._picture, self._number = picture, self._number + 1
            self._changed.notify_all()

    def after(self, number: int, limit_s: float) -> tuple[bytes, int] | None:
        """A picture newer than that one, or an empty one at the end, when the last was seen; none within the limit."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number > number or self.is_closed, limit_s):
                return None
            return (self._picture if self._number > number else b""), self._number

    def come(self) -> int:
        """One more looks; the number of the picture before the first that is for them."""
        with self._changed:
            self._viewers += 1
            return self._number

    def go(self) -> None:
        with self._changed:
            self._viewers -= 1

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class _Shared:
    def __init__(self, latest: _Latest, access: Access, places: threading.BoundedSemaphore) -> None:
        self.latest, self.access, self.places = latest, access, places

    def why_not(self, query: str, headers: Any) -> str:
        """Any web site can show what is on 127.0.0.1 as a picture of its own: a browser says that it does."""
        if self.access.key is not None:
            return self.access.why_not_key(parse_qs(query).get("key", [None])[0], None)
        if headers.get("Sec-Fetch-PageServer", "none") not in ("none", "same-origin"):
            return "pages of others do not show this stream."
        return self.access.why_not_host(headers.get("Host"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The threads of viewers are waited for by hand: their sockets have to be shut first.
    block_on_close = False
    # Connections that wait to be accepted: beyond these the system refuses everybody for a second.
    request_queue_size = 128
    shared: _Shared

    def __init__(self, host: str, port: int) -> None:
        self._viewers: dict[threading.Thread, socket.socket] = {}
        self.waiting = WaitingConnections[socket.socket]()
        flags = socket.AI_PASSIVE
        self.address_family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)[0][0]
        super().__init__((host, port), _Viewer)

    def process_request(self, request: Any, client_address: Any) -> None:
        ended = self.waiting.add(request, client_address[0])
        if ended is not None:
            with suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._viewers[threading.current_thread()] = request
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.waiting.remove(request)
            self._viewers.pop(threading.current_thread(), None)

    def end_viewers(self) -> None:
        viewers, end_s = list(self._viewers.items()), time.monotonic() + _FAREWELL_S
        for thread, _ in viewers:
            thread.join(max(0.0, end_s - time.monotonic()))
        for thread, connection in viewers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_DEAD_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that goes away in the middle is no error."""


class _Request(io.RawIOBase):
    """What a client sends, until its time is over: a timeout of the socket would count anew with every byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end_s = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Viewer(BaseHTTPRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection, REQUEST_S))

    def do_GET(self) -> None:
        server: Any = self.server
        self.connection.settimeout(_DEAD_S)
        shared: _Shared = server.shared
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        key = shared.access.key
        if reason := shared.why_not(asked.query, self.headers):
            # As the explanation, which is escaped: in the status line it could not hold what was asked for.
            self.send_error(403, explain=reason)
        elif asked.path == "/":
            body = _PAGE.replace("QUERY", f"?key={quote(key, safe='')}" if key else "").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
        elif asked.path != _STREAM:
            self.send_error(404)
        elif self.command == "HEAD":
            self._send_kind()
        elif not shared.places.acquire(blocking=False):
            self.send_error(503, "Too many are looking")
        else:
            server.waiting.remove(self.connection)
            number = shared.latest.come()
            try:
                self._send_frames(shared.latest, number)
            finally:
                shared.latest.go()
                shared.places.release()

    # Players ask what it is before they take a place.
    do_HEAD = do_GET

    def _send_kind(self) -> None:
        self.send_response(200)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={_BOUNDARY}")
        self.end_headers()

    def _send_frames(self, latest: _Latest, number: int) -> None:
        self._send_kind()
        while True:
            newer = latest.after(number, _LOOK_S)
            if newer is None:
                if self._has_left():
                    return
                continue
            picture, number = newer
            if not picture:
                return
            head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
            self.wfile.write(head.encode() + picture + b"\r\n")

    def _has_left(self) -> bool:
        """A source that is away for long must not leave all places to those who are gone."""
        with selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(self.connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        return True

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the figures."""


def _listen(host: str, port: int, shared: _Shared) -> _Server:
    if not 0 <= port < 65_536:
        raise RedlineError(f"a port is a number from 0 to 65535, not {port}.")
    try:
        server = _Server(host, port)
    except OSError as error:
        raise RedlineError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from error
    server.shared = shared
    return server
