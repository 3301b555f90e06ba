"""The web server of a stream: the page with its files, and one WebSocket per page. `Access` checks every request."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from aiohttp import web

from redline.machine.host_memory import resident_bytes
from redline.stream.access import Access
from redline.stream.browser.broadcast import Broadcast, shown_size
from redline.stream.browser.messages import LONGEST_MESSAGE_BYTES, MessageError, Offer
from redline.stream.browser.page_session import PageSession
from redline.stream.browser.source import BrowserSource
from redline.stream.browser.webrtc import WebRtcConnection
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.web_server import Handler, WebServer

MAX_PAGES, MAX_CONNECTIONS = 8, 4
_METRICS_EVERY_S = 0.5
_HEARTBEAT_S = 5.0
_ENDED = "The stream has ended."
_FILES = {"/": "page.html"} | {
    f"/{name}": name for name in ("base.css", "page.css", "page.js", "settings.js", "charts.js")
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(eq=False)
class PageServer:
    """Serves the page, in the event loop of the server `web`.

    `info` has the properties of the stream that a page receives in the message `hello` when it connects.
    """

    access: Access
    listener: socket.socket
    tls: ssl.SSLContext | None
    source: BrowserSource | None
    broadcasts: Mapping[str, Broadcast]
    live_settings: LiveSettings
    measure: Callable[[], dict[str, Any]]
    info: dict[str, Any]

    def __post_init__(self) -> None:
        self._cookie = f"redline_{self.listener.getsockname()[1]}"
        self._sessions: set[PageSession] = set()
        self._sent_settings = self.live_settings.now()
        app = web.Application(middlewares=[self._check])
        app.on_response_prepare.append(self._add_headers)
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/socket", self._socket)
        self.web = WebServer(app, self.listener, self._work, self.tls)

    @property
    def settings(self) -> dict[str, Any]:
        """The current settings as JSON values. The seed is a string: JavaScript numbers are exact only up to 2^53."""
        values = asdict(self.live_settings.now())
        unset = self._control_entries - len(values["control"])
        return values | {"seed": str(values["seed"]), "control": [*values["control"], *[0.0] * unset]}

    @property
    def _control_entries(self) -> int:
        return max(len(self.info["control_names"]), len(self.live_settings.now().control))

    async def change(self, changes: dict[str, Any]) -> None:
        control, entries = changes.get("control"), self._control_entries
        if control is not None and (not isinstance(control, list) or len(control) != entries):
            raise MessageError(f"settings: the control vector of this model has {entries} numbers.", "settings")
        steps, most = changes.get("steps"), self.info["most_steps"]
        if isinstance(steps, (int, float)) and steps > most:
            # This limit prevents a page from blocking the device for minutes with one frame.
            raise MessageError(f"settings: a page may set at most {most} steps.", "settings")
        # Runs in a thread, because checking a prompt runs the text encoder.
        await asyncio.get_running_loop().run_in_executor(None, partial(self.live_settings.change, **changes))
        self._send_settings()

    def _send_settings(self) -> None:
        """Sends the settings to all pages if a page or another caller has changed them."""
        now = self.live_settings.now()
        if now is self._sent_settings:
            return
        self._sent_settings = now
        self._send_to_all({"type": "settings", "settings": self.settings})

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for session in self._sessions:
            session.send_later(message)

    def open_connection(self, offer: Offer) -> WebRtcConnection:
        for name, is_there in (("camera", self.source is not None), ("output", "output" in self.broadcasts)):
            if name in offer.lines and not is_there:
                raise MessageError(f"this stream has no {name} in the browser.", "offer")
        if sum(session.connection is not None for session in self._sessions) >= MAX_CONNECTIONS:
            raise MessageError(f"too many connected pages: at most {MAX_CONNECTIONS} are allowed.", "offer")
        if "camera" not in offer.lines or self.source is None:
            return WebRtcConnection(self.access.host, self.broadcasts, None)
        if self._is_camera_taken:
            raise MessageError("another page is sending its camera: press Watch, or stop that page first.", "offer")
        return WebRtcConnection(self.access.host, self.broadcasts, self.source.connect())

    @property
    def _is_camera_taken(self) -> bool:
        return any(session.connection is not None and session.connection.sends for session in self._sessions)

    async def _work(self) -> None:
        try:
            await self._update_pages()
        finally:
            sessions = list(self._sessions)
            await asyncio.gather(*(session.close(_ENDED) for session in sessions))
            await asyncio.gather(*(session.disconnect() for session in sessions))

    async def _update_pages(self) -> None:
        """Sends settings, metrics and the end of the stream to all pages until the server is closed."""
        is_end_sent = False
        while not self.web.stop.is_set():
            self._send_settings()
            metrics = self.measure()
            for session in self._sessions:
                session.send_metrics(metrics)
            if not is_end_sent and "output" in self.broadcasts and self.broadcasts["output"].ended:
                is_end_sent = True
                self._send_to_all({"type": "ended", "text": _ENDED})
            try:
                await asyncio.wait_for(self.web.stop.wait(), _METRICS_EVERY_S)
            except TimeoutError:
                continue

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        why_not = self.access.why_not_host(host)
        if not why_not and (origin is not None or request.path == "/socket"):
            why_not = self.access.why_not_origin(origin, host)
        key = request.query.get("key")
        if not why_not:
            why_not = self.access.why_not_key(key or _bearer(request), request.cookies.get(self._cookie))
        if why_not:
            return web.Response(status=403, text=why_not)
        if key is not None and self.access.key is not None and request.path == "/":
            # The cookie replaces the key, which disappears from the address bar and the history.
            redirect = web.Response(status=303, headers={"Location": "/"})
            secure = self.tls is not None
            redirect.set_cookie(self._cookie, self.access.token, httponly=True, samesite="Strict", secure=secure)
            return redirect
        return await handler(request)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    async def _file(self, request: web.Request) -> web.Response:
        name = _FILES[request.path]
        folder = files("redline.pages") if name == "base.css" else files("redline.stream.browser") / "static"
        text = (folder / name).read_text("utf-8")
        return web.Response(text=text, content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        # aiohttp closes the connection if a message exceeds `max_msg_size`. That is four times the real limit, so a
        # slightly too long message is answered with an error instead.
        socket = web.WebSocketResponse(
            heartbeat=_HEARTBEAT_S, max_msg_size=4 * LONGEST_MESSAGE_BYTES, compress=False, timeout=1.0
        )
        await socket.prepare(request)
        session = PageSession(socket, self)
        if len(self._sessions) >= MAX_PAGES:
            await session.send_error(f"too many open pages: at most {MAX_PAGES} are allowed.", "page")
            await socket.close()
            return socket
        self._sessions.add(session)
        self.web.release(request)
        try:
            now = {"settings": self.settings, "camera_taken": self._is_camera_taken}
            await session.send({"type": "hello", **now, **self.info})
            await session.run()
        finally:
            self._sessions.discard(session)
        return socket


def _bearer(request: web.Request) -> str | None:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else None


def collect_metrics(
    latency: Latency, broadcasts: Mapping[str, Broadcast], now_s: float, device: torch.device, busy_share: float | None
) -> dict[str, Any]:
    """Returns the metrics that all pages show. `busy_share` (device utilization) is None before the first frame."""
    return {
        "type": "figures",
        "at_s": now_s,
        "report": asdict(latency.report()),
        "busy_share": busy_share,
        "memory": _memory(device),
        "images": {name: _image(broadcast) for name, broadcast in broadcasts.items()},
    }


def _memory(device: torch.device) -> dict[str, int]:
    memory = {"process_bytes": resident_bytes()}
    # This function must not initialize CUDA.
    if device.type == "cuda" and torch.cuda.is_initialized():
        memory["gpu_bytes"] = torch.cuda.memory_allocated(device)
        memory["gpu_held_bytes"] = torch.cuda.memory_reserved(device)
    return memory


def _image(broadcast: Broadcast) -> dict[str, int] | None:
    newest = broadcast.newest
    if newest is None:
        return None
    frame = newest.frame
    shown_height, shown_width = shown_size(frame.height, frame.width, frame.pixel_aspect)
    return {
        "frames": newest.count,
        "height": frame.height,
        "width": frame.width,
        "shown_height": shown_height,
        "shown_width": shown_width,
    }
