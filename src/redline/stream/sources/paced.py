"""Makes a source live: its frames come at the times at which they are to be shown, as from a camera.

A frame that comes late has the age that it would have from a camera, so that a source which cannot keep up shows in
the latency. One that is late by more than a frame and a tenth of a second is left out, unless nothing was shown for a
while.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.sources import Source

SOURCE_LATE = "source late"
_LATE_S = 0.1
# A source that is always late still shows something.
_LONGEST_GAP_S = 0.5


class Paced:
    """Times are taken from the first frame's, not from the frame before: being late once does not slow the rest."""

    is_live = True

    def __init__(
        self, source: Source, clock: Clock | None = None, drop: Callable[[str], None] = lambda cause: None
    ) -> None:
        """`drop` is told of frames that are left out."""
        self.inner, self._clock, self._drop = source, clock or SystemClock(), drop
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def rate(self) -> Fraction:
        return self.inner.rate

    @property
    def height(self) -> int:
        return self.inner.height

    @property
    def width(self) -> int:
        return self.inner.width

    def frames(self) -> Generator[Frame, None, None]:
        start_s: float | None = None
        first, given_s = Fraction(0), 0.0
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if start_s is None:
                    start_s = given_s = self._clock.now_s()
                    first = frame.time_s
                due_s = start_s + float(frame.time_s - first)
                if self._clock.wait(due_s - self._clock.now_s(), self._closed):
                    return
                now_s = self._clock.now_s()
                if now_s - due_s > 1 / self.rate + _LATE_S and now_s - given_s < _LONGEST_GAP_S:
                    self._drop(SOURCE_LATE)
                    continue
                given_s = now_s
                yield replace(frame, captured_s=min(now_s, due_s))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()
