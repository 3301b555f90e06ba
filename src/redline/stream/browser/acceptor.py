"""Accepts connections for the page's server, and closes those that do not become an open page in time.

aiohttp waits for a request without a timeout and accepts any number of connections. Here each connection has one
deadline for its TLS handshake, its request and the answer, and when too many are pending, the oldest one is closed.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from redline.stream.access import REQUEST_S, PendingConnections

# Long enough to send the files of the page over a slow connection.
_ANSWERED_S = 2 * REQUEST_S
# The delay before `accept` is retried after an error, such as no free file descriptor.
_RETRY_S = 0.5


class Acceptor:
    """Belongs to one event loop. `protocol` creates the protocol that serves a connection."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self._pending = PendingConnections[asyncio.Task[None]]()
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
                    # Deferred, because a task that has not started would not close its connection.
                    loop.call_soon(oldest.cancel)
        finally:
            await asyncio.sleep(0)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self, transport: asyncio.Transport | None) -> None:
        """Lifts the deadline of a connection that has become an open page."""
        if transport is not None and transport in self._released:
            self._released[transport].set()

    def release_if_sent(self, transport: asyncio.Transport | None) -> None:
        """Lifts the deadline if the whole answer was sent; otherwise the client has time until the deadline."""
        if transport is not None and not transport.get_write_buffer_size():
            self.release(transport)

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop, released = asyncio.get_running_loop(), asyncio.Event()
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(_ANSWERED_S):
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
