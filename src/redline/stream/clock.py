"""The clock of a stream. It is monotonic, and tests replace it to simulate hours."""

import threading
import time


class Clock:
    def now_s(self) -> float:
        """Returns seconds since an arbitrary moment; only differences are meaningful."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits for this time or until `stop` is set. Returns whether it is set."""
        return stop.wait(seconds) if seconds > 0 else stop.is_set()
