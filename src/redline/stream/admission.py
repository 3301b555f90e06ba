"""Limits connections that were not let in yet, so that nobody who only connects keeps viewers out.

A connection waits until its request was read and allowed. Few may wait in all and few of one address; one more ends the
one that has waited longest, since a viewer sends its request at once and whoever holds a connection open does not.
"""

import threading
from typing import Generic, TypeVar

MOST_WAITING, MOST_WAITING_PER_ADDRESS = 64, 16
# A request is one packet; whoever takes longer than this for all of it is not waited for.
REQUEST_S = 5.0
T = TypeVar("T")


class WaitingConnections(Generic[T]):
    """Used from any thread. `T` is what the server knows a connection by."""

    def __init__(self, most: int = MOST_WAITING, most_per_address: int = MOST_WAITING_PER_ADDRESS) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._lock = threading.Lock()
        self._addresses: dict[T, str] = {}

    def add(self, connection: T, address: str) -> T | None:
        """Returns the connection that has to be closed for this one, if there are too many."""
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
        """It was let in, or has ended; more than once does no harm."""
        with self._lock:
            self._addresses.pop(connection, None)
