"""Accepts the connections of a page, and ends those that do not become an open page in time.

aiohttp waits for a request without an end and takes any number of connections. Here each has one deadline for its TLS
handshake, its request and the answer, and few wait at a time: one more ends the one that has waited longest.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from redline.stream.admission import REQUEST_S, WaitingConnections

# The files of the page may go over a slow line.
_ANSWERED_S = 2 * REQUEST_S
# While the process has no file left to open for a connection.
_AGAIN_S = 0.5


class Acceptor:
    """In one event loop. `protocol` makes what serves a connection."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self._waiting = WaitingConnections[asyncio.Task[None]]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled: dict[asyncio.Transport, asyncio.Event] = {}

    async def run(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Until it is cancelled, which ends all connections that wait."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(_AGAIN_S)
                    continue
                task = loop.create_task(self._serve(connection, tls))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if (ended := self._waiting.add(task, str(address[0]))) is not None:
                    # Behind its first step: a task that has not begun would not close its connection.
                    loop.call_soon(ended.cancel)
        finally:
            await asyncio.sleep(0)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def settle(self, transport: asyncio.Transport | None) -> None:
        """The connection became an open page: its deadline no longer counts."""
        if transport is not None and transport in self._settled:
            self._settled[transport].set()

    def settle_if_sent(self, transport: asyncio.Transport | None) -> None:
        """The answer is complete; who does not take it has time until the deadline."""
        if transport is not None and not transport.get_write_buffer_size():
            self.settle(transport)

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        transport: asyncio.Transport | None = None
        is_settled = False
        try:
            async with asyncio.timeout(_ANSWERED_S):
                loop, settled = asyncio.get_running_loop(), asyncio.Event()
                transport, _ = await loop.connect_accepted_socket(self._protocol, connection, ssl=tls)
                self._settled[transport] = settled
                await settled.wait()
                is_settled = True
        except (OSError, TimeoutError):  # no TLS, or nothing in time
            pass
        finally:
            if transport is None:
                connection.close()
            else:
                self._settled.pop(transport, None)
                if not is_settled:
                    transport.abort()
            task = asyncio.current_task()
            assert task is not None
            self._waiting.remove(task)
