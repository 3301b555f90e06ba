"""Ends a stream on Ctrl-C, on SIGTERM and when its terminal is closed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Windows has no SIGHUP.
_HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)


@contextmanager
def set_on_signals(stop: threading.Event) -> Iterator[None]:
    """Sets `stop` on the first SIGINT or SIGTERM; a second one has its usual effect.

    SIGHUP sets it every time, because a shell may repeat it, unless it is ignored (nohup). Outside the main thread,
    where Python allows no signal handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if _HANG_UP is not None and signal.getsignal(_HANG_UP) != signal.SIG_IGN:
        before[_HANG_UP] = signal.getsignal(_HANG_UP)

    def handle(number: int, _frame: object) -> None:
        stop.set()
        if number != _HANG_UP:
            signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
