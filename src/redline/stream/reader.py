"""Reads a source to its end, and reconnects a live source with growing delays when it fails."""

import math
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction

from redline.stream.clock import Clock
from redline.stream.frames import Frame
from redline.stream.sources import Source, SourceFault


@dataclass(frozen=True)
class Backoff:
    """The delays between reconnections. The delay is reset to `first_s` once frames have been received for
    `settled_s`."""

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    settled_s: float = 2.0


class Reader:
    """Passes every frame of a source to a callback."""

    def __init__(self, source: Source, clock: Clock, backoff: Backoff, log: Callable[[str], None]) -> None:
        self.faults = 0
        self._source, self._clock, self._backoff, self._log = source, clock, backoff, log
        self._continuous = _ContinuousFrames()

    def read(self, offer: Callable[[Frame], bool], stop: threading.Event) -> bool:
        """Reads until the source ends, `stop` is set or `offer` returns False. Returns whether the source ended."""
        attempt = 0
        while not stop.is_set():
            settled_at_s = math.inf
            try:
                with closing(self._source.frames()) as frames:
                    for frame in frames:
                        now_s = self._clock.now_s()
                        settled_at_s = min(settled_at_s, now_s + self._backoff.settled_s)
                        attempt = 0 if now_s >= settled_at_s else attempt
                        if not offer(self._continuous.renumber(frame)):
                            return False
                return not stop.is_set()
            except SourceFault as fault:
                if stop.is_set():
                    return False
                if not self._source.is_live:
                    raise
                self.faults += 1
                # The exponent is bounded for very long outages.
                delay_s = min(self._backoff.longest_s, self._backoff.first_s * self._backoff.factor ** min(attempt, 64))
                attempt += 1
                self._continuous.interrupt()
                self._log(f"{fault} Trying again in {delay_s:g} s.")
                self._clock.wait(delay_s, stop)
        return False


class _ContinuousFrames:
    """Joins the frames before and after a fault: indices and times continue although the source restarts at 0.

    A video that continues by itself with the next index and time is left unchanged.
    """

    def __init__(self) -> None:
        self._last: Frame | None = None
        self._was_interrupted = False
        self._index_offset = self._pts_offset = 0

    def interrupt(self) -> None:
        self._was_interrupted = self._last is not None

    def renumber(self, frame: Frame) -> Frame:
        if self._was_interrupted and self._last is not None:
            last, self._was_interrupted = self._last, False
            if not (frame.index == last.index + 1 and frame.time_s > last.time_s):
                self._index_offset = last.index + 1 - frame.index
                gap_s = Fraction(max(0.0, frame.captured_s - last.captured_s))
                least = math.floor((last.time_s - frame.time_s) / frame.time_base) + 1
                self._pts_offset = max(least, round((last.time_s + gap_s - frame.time_s) / frame.time_base))
        if self._index_offset or self._pts_offset:
            frame = replace(frame, index=frame.index + self._index_offset, pts=frame.pts + self._pts_offset)
        self._last = frame
        return frame
