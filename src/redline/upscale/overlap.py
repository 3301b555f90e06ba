"""Reading, working and writing at the same time, in order, with a bounded number of items in between.

Reading and writing have a thread each and the work stays in the caller's, where a GPU's context and Ctrl-C are. A
stage waits only on a channel, and a failure anywhere stops both channels, so every stage ends and the first failure
is raised once.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from threading import Condition, Thread
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Stopped(Exception):
    """Another stage has failed: nothing more is put or taken."""


class Channel(Generic[A]):
    """At most `size` items on their way from one thread to another."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[A] = deque()
        self._changed = Condition()
        self._finished = self._stopped = False

    def put(self, item: A) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self._size)
            if self._stopped:
                raise Stopped
            self._items.append(item)
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever waits goes on with `Stopped`; what is on its way is dropped."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[A]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._finished or bool(self._items))
                if self._stopped:
                    raise Stopped
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item
            # Held here until the next one comes, an item would count beyond the channel's size.
            del item


def overlap(read: Generator[A, None, None], work: Callable[[A], B], write: Callable[[B], None], waiting: int) -> None:
    """Sends all that `read` gives through `work` to `write`, in order; `waiting` items may stand before each stage."""
    before: Channel[A] = Channel(waiting)
    behind: Channel[B] = Channel(waiting)
    failures: list[BaseException] = []

    def stop() -> None:
        before.stop()
        behind.stop()

    def guarded(stage: Callable[[], None]) -> None:
        try:
            stage()
        except Stopped:
            return
        except BaseException as error:
            failures.append(error)
            stop()

    def reading() -> None:
        with closing(read):
            for item in read:
                before.put(item)
                del item
        before.finish()

    def working() -> None:
        for item in before:
            behind.put(work(item))
        behind.finish()

    def writing() -> None:
        for item in behind:
            write(item)

    threads = [Thread(target=guarded, args=(stage,), name=stage.__name__) for stage in (reading, writing)]
    for thread in threads:
        thread.start()
    try:
        guarded(working)
    finally:
        # A second Ctrl-C may come while the stages end.
        try:
            _join(threads)
        except BaseException:
            stop()
            _join(threads)
            raise
    if failures:
        raise failures[0]


def _join(threads: list[Thread]) -> None:
    for thread in threads:
        thread.join()
