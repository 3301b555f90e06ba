"""Ctrl-C, and the signal that batch systems send: noticed between steps, so that what was learnt is saved first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StopRequest:
    """`signal` is the number of the first signal that came."""

    signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While inside, the first signal is a request; a second one ends the process as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python lets only the main thread listen to signals.
        return
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: object) -> None:
        if request.signal is None:
            request.signal = number
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
