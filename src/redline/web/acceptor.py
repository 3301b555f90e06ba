"""Accepts connections with a deadline for each, and closes the oldest pending one when too many are pending.

A connection is pending until its request has been read and accepted. The limits are necessary because aiohttp itself
waits for a request without a timeout and accepts any number of connections.
"""

import asyncio
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

# The delay before `accept` is retried after an error, such as no free file descriptor.
_RETRY_S = 0.5


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits the pending connections to `pending` in total, and to `pending_per_address` from one address.

    A connection that is still pending after `deadline_s` is closed. New connections are refused while `open_at_once`
    are open.
    """

    pending: int
    pending_per_address: int
    deadline_s: float
    open_at_once: int = 65_536


class Connections(Protocol):
    """Describes the part of aiohttp's `Server` that an `Acceptor` needs."""

    @property
    def connections(self) -> Collection[Any]: ...

    def __call__(self) -> asyncio.BaseProtocol: ...


class Acceptor:
    """Accepts connections in one event loop. Calling `server` creates the protocol that serves a connection."""

    def __init__(self, server: Connections, limits: ConnectionLimits) -> None:
        self._server, self._limits = server, limits
        self._pending = PendingConnections(limits.pending, limits.pending_per_address)
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
                if self._is_full():
                    connection.close()
                    continue
                task = loop.create_task(self._serve(connection, tls))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if (oldest := self._pending.add(task, str(address[0]))) is not None:
                    # Cancels later, because a task that is cancelled before it starts would not close its connection.
                    loop.call_soon(oldest.cancel)
        finally:
            await asyncio.sleep(0)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_full(self) -> bool:
        most, connections = self._limits.open_at_once, self._server.connections
        if len(connections) < most:
            return False
        # Counts only open connections, because those that were just closed to make room are still listed.
        return sum(one.transport is not None and not one.transport.is_closing() for one in connections) >= most

    def release(self, transport: asyncio.Transport | None) -> None:
        """Removes the deadline of a connection that stays open."""
        if transport is not None and transport in self._released:
            self._released[transport].set()

    def release_if_sent(self, transport: asyncio.Transport | None) -> None:
        """Removes the deadline if the whole answer was sent. Otherwise the client must read the rest before it."""
        if transport is not None and not transport.get_write_buffer_size():
            self.release(transport)

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop, released = asyncio.get_running_loop(), asyncio.Event()
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                transport, _ = await loop.connect_accepted_socket(self._server, connection, ssl=tls)
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
    """Tracks the connections whose requests have not yet been read and accepted.

    Each connection is identified by an object of any type. When too many are pending, in total or from one address,
    the oldest one must be closed: clients send their requests at once, so the oldest is the most likely to be idle.
    """

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit, self._limit_per_address = limit, limit_per_address
        self._addresses: dict[Any, str] = {}

    def add(self, connection: Any, address: str) -> Any:
        """Registers a connection. If there are too many, returns the connection that the caller must close."""
        same = [other for other, of in self._addresses.items() if of == address]
        ended = None
        if len(same) >= self._limit_per_address:
            ended = same[0]
        elif len(self._addresses) >= self._limit:
            ended = next(iter(self._addresses))
        self.remove(ended)
        self._addresses[connection] = address
        return ended

    def remove(self, connection: Any) -> None:
        """Unregisters a connection that was accepted or has ended; may be called repeatedly."""
        self._addresses.pop(connection, None)
