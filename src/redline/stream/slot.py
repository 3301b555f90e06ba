"""What lies between two threads of a stream: a slot of one frame for live sources, a short queue for files.

A queue in front of a live model only makes its output old: so the newest frame replaces the one that waits, and the
lost one is counted. A file loses nothing: whoever puts waits until there is room.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from redline.errors import RedlineError

T = TypeVar("T")
# Told of every drop as it happens: its cause, and how many.
OnDrop = Callable[[str, int], None]
STOPPED = "stopped"


class Channel(Protocol[T]):
    """Any number of threads may put and take. Once closed it takes nothing more in, but what is in it can be taken."""

    @property
    def dropped(self) -> int:
        """What was put and will never be taken."""
        ...

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        """False where there was no room for so long, or where the channel is closed (`closed` tells)."""
        ...

    def take(self, timeout_s: float | None = None) -> T | None:
        """The next item; None where none came for so long, or where the channel is closed and empty."""
        ...

    def wait_for_room(self) -> None:
        """Comes back when a put would not wait, or when the channel is closed."""
        ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Closes, and drops what is in it."""
        ...


class _Waiting(Generic[T]):
    """The lock, the waiting and the end, which both kinds share."""

    def __init__(self, on_drop: OnDrop | None = None) -> None:
        self._on_drop = on_drop
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self, timeout_s: float | None = None) -> T | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._closed = True
            self._drop_all(STOPPED)
            self._changed.notify_all()

    def _drop_all(self, cause: str) -> None:
        count = len(self._items)
        self._items.clear()
        self._dropped += count
        if count and self._on_drop is not None:
            self._on_drop(cause, count)


class FrameSlot(_Waiting[T]):
    """Holds one item, the newest. Putting never waits: what was there is dropped for `cause`."""

    def __init__(self, cause: str = "overwritten", on_drop: OnDrop | None = None) -> None:
        super().__init__(on_drop)
        self._cause = cause

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._drop_all(self._cause)
            self._items.append(item)
            self._changed.notify_all()
            return True

    def wait_for_room(self) -> None:
        """There is always some."""


class FrameQueue(_Waiting[T]):
    """Holds a few items in order and loses none until it is abandoned."""

    def __init__(self, most: int, on_drop: OnDrop | None = None) -> None:
        if most < 1:
            raise RedlineError(f"a queue holds at least one frame, not {most}.")
        super().__init__(on_drop)
        self._most = most

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._most or self._closed, timeout_s)
            if self._closed or len(self._items) >= self._most:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._most or self._closed)
