"""A web server in a separate thread, so that neither the network nor a viewer delays the stream.

By itself, aiohttp waits for a request without a timeout and accepts any number of connections. Here each connection has
one deadline for its TLS handshake, its request and the answer, and when too many are pending, the oldest is closed.
"""

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from redline.errors import RedlineError

MAX_PENDING, MAX_PENDING_PER_ADDRESS = 64, 16
# The deadline of a connection: long enough to send the files of a page over a slow connection.
ANSWERED_S = 10.0
# The delay before `accept` is retried after an error, such as no free file descriptor.
_RETRY_S = 0.5
LOG_EVERY_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer:
    """Serves an application. `start` and `close` may be called from any thread.

    `work` runs in the server's event loop, and must return soon after `stop` is set; then all connections are closed.
    """

    def __init__(
        self,
        app: web.Application,
        listener: socket.socket,
        work: Callable[[], Awaitable[object]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app, self._listener, self._work, self._tls = app, listener, work, tls
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
        """Removes the deadline of a connection that stays open, for a page or a viewer."""
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
        logger = logging.Logger("redline.stream.web_server")  # not shared with other servers
        logger.parent = logging.getLogger()
        logger.addFilter(RequestLogFilter())
        runner = web.AppRunner(self._app, access_log=None, logger=logger, shutdown_timeout=1.0, handle_signals=False)
        await runner.setup()
        assert runner.server is not None
        self._acceptor = _Acceptor(runner.server)
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


class _Acceptor:
    """Accepts connections in one event loop. `protocol` creates the protocol that serves a connection."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self._pending = PendingConnections()
        self._tasks: set[asyncio.Task[None]] = set()
        self._released: dict[asyncio.Transport, asyncio.Event] = {}

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accepts connections until it is cancelled, which closes all pending ones."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(_RETRY_S)
                    continue
                task = loop.create_task(self._serve(connection, tls))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if (oldest := self._pending.add(task, str(address[0]))) is not None:
                    # Cancelled later, because a task that is cancelled before it starts would not close its connection.
                    loop.call_soon(oldest.cancel)
        finally:
            await asyncio.sleep(0)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self, transport: asyncio.Transport | None) -> None:
        """Removes the deadline of a connection that stays open."""
        if transport is not None and transport in self._released:
            self._released[transport].set()

    def release_if_sent(self, transport: asyncio.Transport | None) -> None:
        """Removes the deadline if the whole answer was sent; otherwise the client must read it before the deadline."""
        if transport is not None and not transport.get_write_buffer_size():
            self.release(transport)

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop, released = asyncio.get_running_loop(), asyncio.Event()
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(ANSWERED_S):
                transport, _ = await loop.connect_accepted_socket(self._protocol, connection, ssl=tls)
                self._released[transport] = released
                await released.wait()
        except (OSError, TimeoutError):  # the TLS handshake failed, or the deadline passed
            pass
        finally:
            if transport is None:
                connection.close()
            else:
                self._released.pop(transport, None)
                if not released.is_set():
                    transport.abort()
            task = asyncio.current_task()
            assert task is not None
            self._pending.remove(task)


class PendingConnections:
    """The connections whose requests have not yet been read and accepted, each identified by an object of any type.

    When too many are pending, in total or from one address, the oldest one must be closed: a viewer sends its request
    at once, so the oldest is the most likely to be idle.
    """

    def __init__(self) -> None:
        self._addresses: dict[Any, str] = {}

    def add(self, connection: Any, address: str) -> Any:
        """Registers a connection. If there are too many, returns the connection that the caller must close."""
        same = [other for other, of in self._addresses.items() if of == address]
        ended = None
        if len(same) >= MAX_PENDING_PER_ADDRESS:
            ended = same[0]
        elif len(self._addresses) >= MAX_PENDING:
            ended = next(iter(self._addresses))
        self.remove(ended)
        self._addresses[connection] = address
        return ended

    def remove(self, connection: Any) -> None:
        """Unregisters a connection that was accepted or has ended; may be called repeatedly."""
        self._addresses.pop(connection, None)


class RequestLogFilter(logging.Filter):
    """Shortens log records of malformed requests to one line, and passes at most one per ten seconds.

    Otherwise clients could flood the disk or the terminal.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s, self._last_s, self._dropped = now_s, -LOG_EVERY_S, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._now_s()
        if now_s - self._last_s < LOG_EVERY_S:
            self._dropped += 1
            return False
        dropped, self._last_s, self._dropped = self._dropped, now_s, 0
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
            text = f"refused a malformed HTTP request ({type(error).__name__})"
        record.msg, record.args = text + (f"; {dropped:,} more were not logged" if dropped else ""), ()
        return True
