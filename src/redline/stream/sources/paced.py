"""Makes a source live: its frames come at the times at which they are to be shown, as from a camera."""

import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.sources import Source


class Paced:
    """Times are taken from the first frame's, not from the frame before: being late once does not slow the rest."""

    is_live = True

    def __init__(self, source: Source, clock: Clock | None = None) -> None:
        self.inner, self._clock = source, clock or SystemClock()
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
        first = Fraction(0)
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if start_s is None:
                    start_s, first = self._clock.now_s(), frame.time_s
                due_s = start_s + float(frame.time_s - first)
                if self._clock.wait(due_s - self._clock.now_s(), self._closed):
                    return
                yield replace(frame, captured_s=self._clock.now_s())

    def close(self) -> None:
        self._closed.set()
        self.inner.close()
