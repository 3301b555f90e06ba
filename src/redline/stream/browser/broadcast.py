"""Frames on their way to any number of viewers: each gets the newest when it is ready, and none is waited for."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.latency import PERCENTILES

_WINDOW = 256


@dataclass(frozen=True)
class Published:
    """A frame, which it was of all, and when it came."""

    frame: Frame
    count: int
    at_s: float


class Broadcast:
    """Filled from any thread; putting takes no longer with viewers than without. `wanted` is set once a viewer is
    connected and asks for a picture."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._newest: Published | None = None
        self._ended = False
        self.wanted = threading.Event()
        self._views: set[Viewer] = set()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def newest(self) -> Published | None:
        with self._lock:
            return self._newest

    def put(self, frame: Frame) -> None:
        with self._lock:
            count = self._newest.count if self._newest is not None else 0
            self._newest = Published(frame, count + 1, self.clock.now_s())
            views = list(self._views)
        for view in views:
            view.wake()

    def end(self) -> None:
        """Viewers keep the last picture and get no other."""
        with self._lock:
            self._ended = True
            views = list(self._views)
        for view in views:
            view.wake()

    def view(self) -> "Viewer":
        """For one viewer, in its event loop."""
        view = Viewer(self)
        with self._lock:
            self._views.add(view)
        return view

    def leave(self, view: "Viewer") -> None:
        with self._lock:
            self._views.discard(view)


class Viewer:
    """What one viewer has seen. `skipped` frames were overtaken while it was busy. Times are those of new frames when
    they were on the way to it: since their capture, and since they were put here."""

    def __init__(self, outlet: Broadcast) -> None:
        self._outlet, self._loop = outlet, asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._seen: int | None = None
        # What was put before this viewer came waited for it: its age says nothing about the way here.
        newest = outlet.newest
        self._before = 0 if newest is None else newest.count
        self._ages_s: deque[float] = deque(maxlen=_WINDOW)
        self._sendings_s: deque[float] = deque(maxlen=_WINDOW)
        self.taken = self.skipped = 0

    async def next(self, repeat_after_s: float) -> tuple[Published, bool] | None:
        """The newest frame, and whether it came while this viewer was there: the last one is shown at first, and again
        where no other comes for so long, so that a lost packet does not spoil a picture that stands still. None at the
        end."""
        self._outlet.wanted.set()
        while True:
            self._woken.clear()
            put = self._outlet.newest
            if self._outlet.ended:
                return None
            if put is not None and put.count != self._seen:
                self.skipped += put.count - self._seen - 1 if self._seen is not None else 0
                self._seen = put.count
                self.taken += 1
                return put, put.count > self._before
            try:
                await asyncio.wait_for(self._woken.wait(), repeat_after_s)
            except TimeoutError:
                if put is not None:
                    return put, False

    def sent(self, put: Published) -> None:
        now_s = self._outlet.clock.now_s()
        self._ages_s.append(now_s - put.frame.captured_s)
        self._sendings_s.append(now_s - put.at_s)

    def ages_s(self) -> list[float] | None:
        return _percentiles(self._ages_s)

    def sendings_s(self) -> list[float] | None:
        return _percentiles(self._sendings_s)

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            # The loop is closed: nobody looks any longer.
            self._outlet.leave(self)

    def leave(self) -> None:
        self._outlet.leave(self)


def _percentiles(values: Iterable[float]) -> list[float] | None:
    kept = list(values)
    return np.percentile(kept, PERCENTILES).tolist() if kept else None
