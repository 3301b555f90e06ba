"""Handles Ctrl-C and SIGTERM in commands.

SIGTERM (from `kill`, `timeout` or a batch system) ends a command as Ctrl-C does: `KeyboardInterrupt` unwinds the stack,
so temporary folders are deleted and child processes are ended. A command that handles SIGTERM itself replaces the
handler while it runs.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@dataclass
class Termination:
    """Handler of SIGTERM; `requested` is true after the signal."""

    requested: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Only the first signal has an effect: `timeout` sends it twice, and the second would interrupt the cleanup.
        if not self.requested:
            self.requested = True
            raise KeyboardInterrupt


@contextmanager
def sigterm_as_interrupt() -> Iterator[Termination]:
    """Raises `KeyboardInterrupt` on SIGTERM, unless the caller has its own handler or ignores the signal."""
    termination = Termination()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or not _in_main_thread():
        yield termination
        return
    signal.signal(signal.SIGTERM, termination)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted_imports() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the imports in the block are done; a second signal takes effect at once.

    Some packages treat an interrupted import as a missing optional dependency, and continue without it. Commands import
    large packages in such a block inside their function, so that `--help` does not wait for them.
    """
    # Handlers of the caller, and ignored signals, are not replaced.
    delayed: dict[int, Callable[[int, FrameType | None], object]] = {}
    if _in_main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or isinstance(handler, Termination):
                delayed[number] = handler
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            delayed[number](number, frame)
        received.append(number)

    for number in delayed:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
    if received:
        delayed[received[0]](received[0], None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
