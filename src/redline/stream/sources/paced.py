"""Makes a source live: its frames come at their presentation times, as from a camera.

The age of a late frame counts from the time at which it was due, so that the latency shows that a source cannot keep
up. A frame that is late by more than one frame and a tenth of a second is dropped, unless no frame was shown in the
last half second.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

from redline.stream.clock import Clock
from redline.stream.frames import Frame
from redline.stream.sources import Source, SourceWrapper

SOURCE_LATE = "source late"
_LATE_S = 0.1
# A source that is always late still shows a frame this often.
_LONGEST_GAP_S = 0.5


class Paced(SourceWrapper):
    """Times count from the first frame, so that one late frame does not delay the rest.

    `drop` is called with the cause for each dropped frame.
    """

    def __init__(
        self, source: Source, clock: Clock | None = None, drop: Callable[[str], None] = lambda cause: None
    ) -> None:
        super().__init__(source)
        self.is_live = True
        self._clock, self._drop = clock or Clock(), drop
        self._closed = threading.Event()

    def frames(self) -> Generator[Frame, None, None]:
        start_s: float | None = None
        first, shown_s = Fraction(0), 0.0
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if start_s is None:
                    start_s = shown_s = self._clock.now_s()
                    first = frame.time_s
                due_s = start_s + float(frame.time_s - first)
                if self._clock.wait(due_s - self._clock.now_s(), self._closed):
                    return
                now_s = self._clock.now_s()
                if now_s - due_s > 1 / self.rate + _LATE_S and now_s - shown_s < _LONGEST_GAP_S:
                    self._drop(SOURCE_LATE)
                    continue
                shown_s = now_s
                yield replace(frame, captured_s=min(now_s, due_s))

    def close(self) -> None:
        self._closed.set()
        super().close()
