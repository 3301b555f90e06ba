"""The one clock of a stream: never set back, and replaced in tests, so that hours pass in no time."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since some moment; only differences mean anything."""
        ...

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits, but no longer than until `stop` is set; whether it is set."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds) if seconds > 0 else stop.is_set()
