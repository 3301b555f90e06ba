"""The web site of a stream: the page with its files, and a socket a page, all behind `Access`.

It lives in a thread of its own, so that neither the network nor a page can hold up the stream.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from aiohttp import web

from redline.errors import RedlineError
from redline.stream.access import Access
from redline.stream.browser.acceptor import Acceptor
from redline.stream.browser.broadcast import Broadcast
from redline.stream.browser.messages import LONGEST_MESSAGE_BYTES, MessageError, Offer
from redline.stream.browser.page_session import Session
from redline.stream.browser.request_log import request_logger
from redline.stream.browser.source import BrowserSource
from redline.stream.browser.webrtc import WebRtcConnection
from redline.stream.settings import LiveSettings

MOST_PAGES, MOST_PEERS = 8, 4
_EVERY_S = 0.5
_HEARTBEAT_S = 5.0
_FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js", "/charts.js": "charts.js"}
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


class PageServer:
    def __init__(
        self,
        access: Access,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        source: BrowserSource | None,
        outlets: Mapping[str, Broadcast],
        settings: LiveSettings,
        measure: Callable[[], dict[str, Any]],
        about: dict[str, Any],
    ) -> None:
        self._access, self._listener, self._tls, self._source = access, listener, tls, source
        self._outlets, self._settings, self._measure, self._about = dict(outlets), settings, measure, about
        self._cookie = f"redline_{listener.getsockname()[1]}"
        self._sessions: set[Session] = set()
        self._told = settings.now()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="redline-browser", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise RedlineError(f"the page cannot be served: {self._error}.") from self._error

    def close(self) -> None:
        """From any thread, and as often as one likes."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._listener.close()

    @property
    def settings(self) -> dict[str, Any]:
        """A seed has up to 63 bits, and a page's numbers 53. Elsewhere fewer controls may be set than have sliders."""
        values = asdict(self._settings.now())
        unset = self._controls - len(values["control"])
        return values | {"seed": str(values["seed"]), "control": [*values["control"], *[0.0] * unset]}

    @property
    def _controls(self) -> int:
        return max(len(self._about["control_names"]), len(self._settings.now().control))

    async def change(self, changes: dict[str, Any]) -> None:
        control, length = changes.get("control"), self._controls
        if control is not None and (not isinstance(control, list) or len(control) != length):
            raise MessageError(f"the control vector of this model has {length} numbers.", "settings")
        steps, most = changes.get("steps"), self._about["most_steps"]
        if isinstance(steps, int) and steps > most:
            # Who starts the stream may ask for more: a page could keep the device busy for minutes with one frame.
            raise MessageError(f"a page may ask for {most} steps at the most.", "settings")
        # Beside the loop, which sends pictures meanwhile: a prompt is read before it counts.
        await asyncio.get_running_loop().run_in_executor(None, partial(self._settings.change, **changes))
        self._tell_settings()

    def _tell_settings(self) -> None:
        """To all pages, where they were changed, by a page or from elsewhere."""
        now = self._settings.now()
        if now is self._told:
            return
        self._told, said = now, {"type": "settings", "settings": self.settings}
        for session in self._sessions:
            session.later(said)

    def open_peer(self, session: Session, offer: Offer) -> WebRtcConnection:
        for name, is_there in (("camera", self._source is not None), ("output", "output" in self._outlets)):
            if name in offer.lines and not is_there:
                raise MessageError(f"this stream has no {name} in a browser.", "offer")
        if sum(other.peer is not None for other in self._sessions) >= MOST_PEERS:
            raise MessageError(f"{MOST_PEERS} pages are connected already, and more cannot be.", "offer")
        if "camera" not in offer.lines or self._source is None:
            return WebRtcConnection(self._access.host, self._outlets, None)
        if self._is_camera_taken:
            raise MessageError(
                "another page is sending its camera already: watch here, or stop it there first.", "offer"
            )
        return WebRtcConnection(self._access.host, self._outlets, self._source.connect())

    @property
    def _is_camera_taken(self) -> bool:
        return any(session.peer is not None and session.peer.sends for session in self._sessions)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(self._add_headers)
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/socket", self._socket)
        runner = web.AppRunner(
            app, access_log=None, logger=request_logger(), shutdown_timeout=1.0, handle_signals=False
        )
        await runner.setup()
        assert runner.server is not None
        self._gate = Acceptor(runner.server)
        accepting = asyncio.create_task(self._gate.run(self._listener, self._tls))
        try:
            self._ready.set()
            told_end = False
            while not self._stop.is_set():
                self._tell_settings()
                said = self._measure()
                for session in self._sessions:
                    session.push(said)
                if not told_end and "output" in self._outlets and self._outlets["output"].ended:
                    told_end = True
                    for session in self._sessions:
                        session.later({"type": "ended", "text": "The stream has ended."})
                try:
                    await asyncio.wait_for(self._stop.wait(), _EVERY_S)
                except TimeoutError:
                    continue
        finally:
            sessions = list(self._sessions)
            await asyncio.gather(*(session.end("The stream has ended.") for session in sessions))
            await asyncio.gather(*(session.drop_peer() for session in sessions))
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        answer = await self._answer(request, handler)
        if not isinstance(answer, web.WebSocketResponse):
            # One request a connection: none is held open for another.
            answer.force_close()
            request.task.add_done_callback(lambda _, transport=request.transport: self._gate.settle_if_sent(transport))
        return answer

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        why_not = self._access.why_not_host(host)
        if not why_not and (origin is not None or request.path == "/socket"):
            why_not = self._access.why_not_origin(origin, host)
        key = request.query.get("key")
        if not why_not:
            why_not = self._access.why_not_key(key or _bearer(request), request.cookies.get(self._cookie))
        if why_not:
            return web.Response(status=403, text=why_not)
        if key is not None and self._access.key is not None and request.path == "/":
            # From here on the cookie stands for the key, which leaves the address bar and the history.
            moved = web.Response(status=303, headers={"Location": "/"})
            secure = self._tls is not None
            moved.set_cookie(self._cookie, self._access.token, httponly=True, samesite="Strict", secure=secure)
            return moved
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}.")

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    async def _file(self, request: web.Request) -> web.Response:
        name = _FILES[request.path]
        text = (files("redline.stream.browser") / "static" / name).read_text("utf-8")
        return web.Response(text=text, content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        # Longer messages than allowed are still read, as far as four times that, so as to be answered.
        answer = web.WebSocketResponse(
            heartbeat=_HEARTBEAT_S, max_msg_size=4 * LONGEST_MESSAGE_BYTES, compress=False, timeout=1.0
        )
        await answer.prepare(request)
        session = Session(answer, self)
        if len(self._sessions) >= MOST_PAGES:
            await session.complain(f"{MOST_PAGES} pages are open already, and more cannot be.", "page")
            await answer.close()
            return answer
        self._sessions.add(session)
        self._gate.settle(request.transport)
        try:
            now = {"settings": self.settings, "camera_taken": self._is_camera_taken}
            await session.say({"type": "hello", **now, **self._about})
            await session.run()
        finally:
            self._sessions.discard(session)
        return answer


def _bearer(request: web.Request) -> str | None:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else None
