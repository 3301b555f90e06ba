"""Distributes frames to any number of viewers: each gets the newest frame when it is ready, and publishing never waits
for a viewer."""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.stream.clock import Clock
from redline.stream.frames import Frame
from redline.stream.latency import PERCENTILES
from redline.stream.sinks import Sink

_WINDOW = 256


@dataclass(frozen=True)
class Published:
    """A frame, its number counted from 1, and the time at which it was published."""

    frame: Frame
    count: int
    at_s: float


class Broadcast:
    """`publish` may be called from any thread. `wanted` is set once a connected viewer asks for a frame."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._lock = threading.Lock()
        self.newest: Published | None = None
        self.ended = False
        self.wanted = threading.Event()
        self._viewers: set[Viewer] = set()

    def publish(self, frame: Frame) -> None:
        with self._lock:
            count = self.newest.count if self.newest is not None else 0
            self.newest = Published(frame, count + 1, self.clock.now_s())
        self._wake_viewers()

    def end(self) -> None:
        """Ends the broadcast. Viewers keep showing the last frame."""
        self.ended = True
        self._wake_viewers()

    def _wake_viewers(self) -> None:
        with self._lock:
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()

    def add_viewer(self) -> "Viewer":
        """Returns a viewer for the running event loop."""
        viewer = Viewer(self)
        with self._lock:
            self._viewers.add(viewer)
        return viewer

    def remove_viewer(self, viewer: "Viewer") -> None:
        with self._lock:
            self._viewers.discard(viewer)


class BrowserSink(Sink):
    """The pages as a sink: `write` only publishes the frame, so slow, dead or absent viewers cost nothing."""

    name = "browser"

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def write(self, frame: Frame) -> None:
        self._broadcast.publish(frame)

    def close(self, complete: bool = True) -> None:
        self._broadcast.end()


class Viewer:
    """One receiver of a broadcast. `skipped` counts frames that were replaced by newer ones while it was busy."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast, self._loop = broadcast, asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._seen: int | None = None
        # A frame that was published before this viewer connected has waited, so its age is not measured.
        newest = broadcast.newest
        self._count_at_start = 0 if newest is None else newest.count
        self._ages_s: deque[float] = deque(maxlen=_WINDOW)
        self._sendings_s: deque[float] = deque(maxlen=_WINDOW)
        self.taken = self.skipped = 0

    async def next(self, repeat_after_s: float) -> tuple[Published, bool] | None:
        """Returns the newest frame, and whether its age is to be measured; None at the end of the broadcast.

        The age is measured for frames published after the viewer connected. If no new frame comes within
        `repeat_after_s`, the last one is returned again, so that a lost packet does not spoil a still image for long.
        """
        self._broadcast.wanted.set()
        while True:
            self._woken.clear()
            newest = self._broadcast.newest
            if self._broadcast.ended:
                return None
            if newest is not None and newest.count != self._seen:
                self.skipped += newest.count - self._seen - 1 if self._seen is not None else 0
                self._seen = newest.count
                self.taken += 1
                return newest, newest.count > self._count_at_start
            try:
                await asyncio.wait_for(self._woken.wait(), repeat_after_s)
            except TimeoutError:
                if newest is not None:
                    return newest, False

    def sent(self, published: Published) -> None:
        """Records how long ago the frame was captured and published."""
        now_s = self._broadcast.clock.now_s()
        self._ages_s.append(now_s - published.frame.captured_s)
        self._sendings_s.append(now_s - published.at_s)

    def metrics(self) -> dict[str, Any]:
        """Returns counts, and p50, p95 and p99 of the time from capture to sending (`ages_s`) and from publication to
        sending (`sendings_s`), or None before a frame was sent."""
        times = {"ages_s": self._ages_s, "sendings_s": self._sendings_s}
        percentiles = {
            name: np.percentile(list(kept), PERCENTILES).tolist() if kept else None for name, kept in times.items()
        }
        return {"taken": self.taken, "skipped": self.skipped, **percentiles}

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:  # the loop is closed
            self.leave()

    def leave(self) -> None:
        self._broadcast.remove_viewer(self)
