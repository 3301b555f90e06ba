"""Runs a web server in a separate thread, so that neither the network nor a client delays the rest of the program.

Each connection has one deadline for its TLS handshake and its first request. Without keep-alive, the answer must
also be sent before this deadline, and a connection serves only one request.
"""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from redline.errors import RedlineError
from redline.web.acceptor import Acceptor, ConnectionLimits
from redline.web.request_log import RequestLogFilter

MAX_PENDING, MAX_PENDING_PER_ADDRESS = 64, 16
# The deadline of a connection: long enough to send the files of a page over a slow connection.
ANSWERED_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer:
    """Serves an application. `start` and `close` may be called from any thread.

    `work` runs in the server's event loop, and must return soon after `stop` is set; then all connections are closed.
    With `keep_alive_s`, connections stay open for further requests, and the application calls `release` as soon as it
    has read a request. `options` are passed to aiohttp's `AppRunner`.
    """

    def __init__(
        self,
        app: web.Application,
        listener: socket.socket,
        work: Callable[[], Awaitable[object]],
        tls: ssl.SSLContext | None = None,
        *,
        limits: ConnectionLimits | None = None,
        keep_alive_s: float = 0.0,
        **options: Any,
    ) -> None:
        self._app, self._listener, self._work, self._tls = app, listener, work, tls
        self._limits = limits or ConnectionLimits(MAX_PENDING, MAX_PENDING_PER_ADDRESS, ANSWERED_S)
        self._options = options
        if keep_alive_s:
            self._options["keepalive_timeout"] = keep_alive_s
        else:
            app.middlewares.insert(0, self._release_when_sent)  # the first middleware is the outermost
        self.stop, self._ready = asyncio.Event(), threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="redline-web-server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._listener.close()
            raise RedlineError(f"the page cannot be served: {self._error}.") from self._error

    def close(self) -> None:
        """Stops the server; may be called repeatedly."""
        if self.loop is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join()
        self._listener.close()

    def release(self, request: web.Request) -> None:
        """Removes the deadline of the request's connection, which then stays open, for example for a video stream."""
        self._acceptor.release(request.transport)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        logger = logging.Logger("redline.web.server")  # not shared with other servers
        logger.parent = logging.getLogger()
        logger.addFilter(RequestLogFilter())
        options: dict[str, Any] = {"shutdown_timeout": 1.0, **self._options}
        runner = web.AppRunner(self._app, access_log=None, logger=logger, handle_signals=False, **options)
        await runner.setup()
        assert runner.server is not None
        self._acceptor = Acceptor(runner.server, self._limits)
        accepting = asyncio.create_task(self._acceptor.run(self._listener, self._tls))
        try:
            self._ready.set()
            await self._work()
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await runner.cleanup()

    @web.middleware
    async def _release_when_sent(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=f"{error.reason}.")
        if not isinstance(answer, web.WebSocketResponse):
            # No connection is kept open for a second request.
            answer.force_close()
            release = self._acceptor.release_if_sent
            request.task.add_done_callback(lambda _, transport=request.transport: release(transport))
        return answer
