"""Limits pending connections, so that clients that connect without sending a request cannot keep viewers out.

A connection is pending until its request was read and accepted. When too many are pending, in total or from one
address, the oldest one is closed: a viewer sends its request at once, so the oldest is the most likely to be idle.
"""

import threading
from typing import Generic, TypeVar

MAX_PENDING, MAX_PENDING_PER_ADDRESS = 64, 16
# A request is one packet; a client that takes longer is disconnected.
REQUEST_S = 5.0
T = TypeVar("T")


class PendingConnections(Generic[T]):
    """May be used from any thread. `T` identifies a connection."""

    def __init__(self, most: int = MAX_PENDING, most_per_address: int = MAX_PENDING_PER_ADDRESS) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._lock = threading.Lock()
        self._addresses: dict[T, str] = {}

    def add(self, connection: T, address: str) -> T | None:
        """Registers a connection. If there are too many, returns the connection that the caller must close."""
        with self._lock:
            same = [other for other, of in self._addresses.items() if of == address]
            ended = None
            if len(same) >= self._most_per_address:
                ended = same[0]
            elif len(self._addresses) >= self._most:
                ended = next(iter(self._addresses))
            if ended is not None:
                del self._addresses[ended]
            self._addresses[connection] = address
            return ended

    def remove(self, connection: T) -> None:
        """Unregisters a connection that was accepted or has ended; may be called repeatedly."""
        with self._lock:
            self._addresses.pop(connection, None)
