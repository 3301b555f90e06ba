"""The clock of a stream. It is monotonic, and tests replace it to simulate hours."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Returns seconds since an arbitrary moment; only differences are meaningful."""
        ...

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits for this time or until `stop` is set. Returns whether it is set."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds) if seconds > 0 else stop.is_set()
