"""A bounded queue between threads, which either waits while it is full or replaces its oldest item."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from redline.errors import RedlineError

T = TypeVar("T")
# A callback for drops, called with the cause and the number of dropped items.
OnDrop = Callable[[str, int], None]
STOPPED = "stopped"


class Channel(Generic[T]):
    """Holds at most `size` items. Any number of threads may put and take.

    By default `put` waits while the channel is full, and no item is lost until `abandon`. With `overwrite_cause`,
    `put` never waits: it drops the oldest item when the channel is full and reports this cause to `on_drop`.
    """

    def __init__(self, size: int, on_drop: OnDrop | None = None, *, overwrite_cause: str | None = None) -> None:
        if size < 1:
            raise RedlineError(f"a channel holds at least one item, not {size}.")
        self._size, self._on_drop, self._overwrite_cause = size, on_drop, overwrite_cause
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self.closed = False
        # The number of items that were put but dropped before they were taken.
        self.dropped = 0

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        """Adds an item. Returns False if the channel is closed or stays full until the timeout."""
        with self._changed:
            if not self.closed and self._overwrite_cause is not None:
                self._drop(len(self._items) - self._size + 1, self._overwrite_cause)
            self._changed.wait_for(self._has_room_or_is_closed, timeout_s)
            if self.closed or len(self._items) >= self._size:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def wait_for_room(self) -> None:
        """Waits until `put` would return at once."""
        with self._changed:
            self._changed.wait_for(lambda: self._overwrite_cause is not None or self._has_room_or_is_closed())

    def take(self, timeout_s: float | None = None) -> T | None:
        """Returns the next item, or None if the channel is closed and empty, or if no item comes before the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self.closed, timeout_s)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[T]:
        """Yields items until the channel is closed and empty."""
        while (item := self.take()) is not None:
            yield item
            # Drops the reference, because the generator would keep the item alive while it waits for the next item.
            del item

    def close(self) -> None:
        """Refuses new items. Items already in the channel can still be taken."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Closes the channel and drops its items."""
        with self._changed:
            self.closed = True
            self._drop(len(self._items), STOPPED)
            self._changed.notify_all()

    def _has_room_or_is_closed(self) -> bool:
        return len(self._items) < self._size or self.closed

    def _drop(self, count: int, cause: str) -> None:
        for _ in range(count):
            self._items.popleft()
        if count > 0:
            self.dropped += count
            if self._on_drop is not None:
                self._on_drop(cause, count)
