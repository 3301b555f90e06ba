"""A clock that tests advance: waiting takes no time, and the waits are recorded."""

import threading


class ManualClock:
    def __init__(self) -> None:
        self._now_s = 100.0
        self._lock = threading.Lock()
        self.waits: list[float] = []

    def now_s(self) -> float:
        return self._now_s

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        with self._lock:
            self.waits.append(seconds)
            self._now_s += max(0.0, seconds)
        return stop.is_set()

    def pass_s(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds
