"""Frames on their way to any number of viewers: each gets the newest when it is ready, and none is waited for."""

import asyncio
import threading
from collections import deque

import numpy as np

from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.latency import PERCENTILES

_WINDOW = 256


class Outlet:
    """Filled from any thread; putting takes no longer with viewers than without. `wanted` is set once a viewer is
    connected and asks for a picture."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._newest: Frame | None = None
        self._count = 0
        self._ended = False
        self.wanted = threading.Event()
        self._views: set[View] = set()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def newest(self) -> tuple[Frame | None, int]:
        """The newest frame, and how many there have been."""
        with self._lock:
            return self._newest, self._count

    def put(self, frame: Frame) -> None:
        with self._lock:
            self._newest = frame
            self._count += 1
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

    def view(self) -> "View":
        """For one viewer, in its event loop."""
        view = View(self)
        with self._lock:
            self._views.add(view)
        return view

    def leave(self, view: "View") -> None:
        with self._lock:
            self._views.discard(view)


class View:
    """What one viewer has seen. `skipped` frames were overtaken while it was busy; ages are those of frames at the
    moment they were handed to its encoder."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet, self._loop = outlet, asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._seen: int | None = None
        self._ages_s: deque[float] = deque(maxlen=_WINDOW)
        self.taken = self.skipped = 0

    async def next(self, repeat_after_s: float) -> tuple[Frame, bool] | None:
        """The newest frame, and whether it is new: the last one comes again where no other does for so long, so that
        a lost packet does not spoil a picture that stands still. None at the end."""
        self._outlet.wanted.set()
        while True:
            self._woken.clear()
            frame, count = self._outlet.newest
            if self._outlet.ended:
                return None
            if frame is not None and count != self._seen:
                self.skipped += count - self._seen - 1 if self._seen is not None else 0
                self._seen = count
                self.taken += 1
                return frame, True
            try:
                await asyncio.wait_for(self._woken.wait(), repeat_after_s)
            except TimeoutError:
                if frame is not None:
                    return frame, False

    def handed_over(self, frame: Frame) -> None:
        self._ages_s.append(self._outlet.clock.now_s() - frame.captured_s)

    def ages_s(self) -> list[float] | None:
        return np.percentile(list(self._ages_s), PERCENTILES).tolist() if self._ages_s else None

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            # The loop is closed: nobody looks any longer.
            self._outlet.leave(self)

    def leave(self) -> None:
        self._outlet.leave(self)
