"""How commands react to Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted_imports() -> Iterator[None]:
    """Delays Ctrl-C until the imports in the block are done; a second Ctrl-C interrupts at once.

    Some packages take an interrupt for a missing optional dependency and continue without it. Commands import large
    packages in such a block inside their function, so that `--help` does not wait for them.
    """
    before = signal.getsignal(signal.SIGINT)
    # Another handler, or a caller that ignores the signal, stays in charge.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []

    def note(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(True)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
