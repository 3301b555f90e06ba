"""Overlaps reading, computing and writing, in order, with bounded queues between the stages.

Reading and writing each have a thread. The computing runs in the caller's thread, which has the GPU's context and
receives Ctrl-C. The two queues are of the class `Channel`. An error in computing or writing abandons both queues; all
stages then end, because a stage waits only for a queue. After an error in reading, the items that were already read are
still processed and written. The first error is raised.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from threading import Thread
from typing import TypeVar

from redline.machine.channels import Channel

A = TypeVar("A")
B = TypeVar("B")


def overlap(read: Generator[A, None, None], work: Callable[[A], B], write: Callable[[B], None], waiting: int) -> None:
    """Passes the items of `read` through `work` to `write`, in order; at most `waiting` items queue between stages."""
    before: Channel[A] = Channel(waiting)
    behind: Channel[B] = Channel(waiting)
    failures: list[BaseException] = []

    def stop() -> None:
        before.abandon()
        behind.abandon()

    def guarded(stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            failures.append(error)
            stop()

    def reading() -> None:
        try:
            with closing(read):
                for item in read:
                    if not before.put(item):
                        return
                    del item
        except Exception as error:
            failures.append(error)
        before.close()

    def working() -> None:
        for item in before:
            if not behind.put(work(item)):
                return
        behind.close()

    def writing() -> None:
        for item in behind:
            write(item)

    def join() -> None:
        for thread in threads:
            thread.join()

    threads = [Thread(target=guarded, args=(stage,), name=stage.__name__) for stage in (reading, writing)]
    for thread in threads:
        thread.start()
    try:
        guarded(working)
    finally:
        # A second Ctrl-C may arrive while the stages end.
        try:
            join()
        except BaseException:
            stop()
            join()
            raise
    if failures:
        raise failures[0]
