"""Reads a source to its end, and through its faults where it is live: it tries again, ever more slowly."""

import math
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction

from redline.errors import RedlineError
from redline.stream.clock import Clock
from redline.stream.frames import Frame
from redline.stream.sources import Source, SourceFault


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before each new try, from the first again once frames have come for `settled_s`; `tries` in a row
    that did not last so long are enough, and None never gives up."""

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    tries: int | None = None
    settled_s: float = 2.0

    def __post_init__(self) -> None:
        if self.first_s < 0 or self.factor < 1 or self.longest_s < self.first_s:
            raise RedlineError(f"waits must not be negative and must not shrink: {self}.")

    def delay_s(self, attempt: int) -> float:
        """`attempt` counts from 0; the exponent is bounded, since a camera may be gone for days."""
        return min(self.longest_s, self.first_s * self.factor ** min(attempt, 64))


class Reader:
    """`offer` takes a frame, and says whether more are wanted."""

    def __init__(self, source: Source, clock: Clock, backoff: Backoff, tell: Callable[[str], None]) -> None:
        self.faults = 0
        self._source, self._clock, self._backoff, self._tell = source, clock, backoff, tell
        self._joined = _ContinuousFrames()

    def read(self, offer: Callable[[Frame], bool], stop: threading.Event) -> bool:
        """Whether the source came to its end by itself."""
        attempt = 0
        while not stop.is_set():
            settled_at_s = math.inf
            try:
                with closing(self._source.frames()) as frames:
                    for frame in frames:
                        now_s = self._clock.now_s()
                        settled_at_s = min(settled_at_s, now_s + self._backoff.settled_s)
                        attempt = 0 if now_s >= settled_at_s else attempt
                        if not offer(self._joined.place(frame)):
                            return False
                return not stop.is_set()
            except SourceFault as fault:
                if stop.is_set():
                    return False
                if not self._source.is_live:
                    raise
                self.faults += 1
                if self._backoff.tries is not None and attempt >= self._backoff.tries:
                    raise RedlineError(f"{self._source.name!r} is given up after {attempt} tries: {fault}") from fault
                delay_s = self._backoff.delay_s(attempt)
                attempt += 1
                self._joined.broken()
                self._tell(f"{fault} Trying again in {delay_s:g} s.")
                self._clock.wait(delay_s, stop)
        return False


class _ContinuousFrames:
    """Frames before and after a fault as one clip: indices and times go on, though the source starts again at 0. A film
    that goes on by itself, with the next index and time, has no gap."""

    def __init__(self) -> None:
        self._last: Frame | None = None
        self._is_broken = False
        self._later_frames = self._later_ticks = 0

    def broken(self) -> None:
        self._is_broken = self._last is not None

    def place(self, frame: Frame) -> Frame:
        if self._is_broken and self._last is not None:
            last, self._is_broken = self._last, False
            if not (frame.index == last.index + 1 and frame.time_s > last.time_s):
                self._later_frames = last.index + 1 - frame.index
                gone = Fraction(max(0.0, frame.captured_s - last.captured_s))
                least = math.floor((last.time_s - frame.time_s) / frame.time_base) + 1
                self._later_ticks = max(least, round((last.time_s + gone - frame.time_s) / frame.time_base))
        if self._later_frames or self._later_ticks:
            frame = replace(frame, index=frame.index + self._later_frames, pts=frame.pts + self._later_ticks)
        self._last = frame
        return frame
