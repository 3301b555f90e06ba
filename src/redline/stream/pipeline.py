"""Source → transform → sink: one thread reads, the caller's thread computes, one thread writes.

A file loses no frame and keeps its order. A live source sets the pace: the model takes the newest frame, and neither
a slow model nor a slow sink makes the output old. Whatever fails, in whichever thread, ends all three and is raised by
`run`. A recording of a live source is kept up to that moment, by a sink that fails as far as it can; of a file no half
is left behind.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from redline.errors import RedlineError
from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame, check_pixels
from redline.stream.latency import FrameTimes, Latency, Report
from redline.stream.reader import Backoff, Reader
from redline.stream.settings import LiveSettings
from redline.stream.sinks import Idles, Sink
from redline.stream.slot import STOPPED, Channel, FrameQueue, FrameSlot
from redline.stream.sources import Source
from redline.stream.transform import Overlapping, TimesCopies, Transform

COMPUTE_BUSY, SINK_BUSY = "compute busy", "sink busy"
# Enough to keep three threads at work; more would only make frames old.
_QUEUED = 1
_IDLE_S = 0.05
# Between two looks at whether a frame is done, while the next is waited for: a small part of the fastest frame.
_GLANCE_S = 1e-4


@dataclass(frozen=True)
class Limits:
    """How long one frame may take in the sink, and the source to let go, before they count as dead."""

    sink_s: float = 60.0
    source_s: float = 15.0


@dataclass(frozen=True)
class Outcome:
    """`whole`: the source came to its end; otherwise it was stopped."""

    whole: bool
    faults: int
    report: Report


class _Arrived(NamedTuple):
    frame: Frame
    offered_s: float


class _Begun(NamedTuple):
    frame: Frame
    offered_s: float
    taken_s: float


class _Made(NamedTuple):
    frame: Frame
    offered_s: float
    taken_s: float
    made_s: float
    copies_s: tuple[float, float]


class Pipeline:
    """`settings`, `stop` and `fail` may be used from any thread while it runs; `tell` is given sentences for the user,
    from the thread in which they come up."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        sink: Sink,
        *,
        settings: LiveSettings | None = None,
        latency: Latency | None = None,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        limits: Limits | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.settings, self.latency = settings or LiveSettings(), latency or Latency()
        self._source, self._transform, self._sink, self._tell = source, transform, sink, tell
        self._clock, self._limits = clock or SystemClock(), limits or Limits()
        self._reader = Reader(source, self._clock, backoff or Backoff(), tell)
        self._input: Channel[_Arrived] = self._channel(COMPUTE_BUSY)
        self._output: Channel[_Made] = self._channel(SINK_BUSY)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._started = self._whole = False
        self._sink_since_s: float | None = None
        self._made_size: tuple[int, int] | None = None

    def run(self) -> Outcome:
        """Until the source ends or `stop` is called; once."""
        if self._started:
            raise RedlineError("a pipeline runs once: make another.")
        self._started = True
        writer, reader = (threading.Thread(target=work, daemon=True) for work in (self._write, self._read))
        try:
            writer.start()
            self._transform.prepare(self._source.height, self._source.width)
            reader.start()
            self._compute()
            self._output.close()
            self._wait_for_sink(writer)
        except BaseException as error:
            self.fail(error)
        self._join(writer, reader)
        if self._error is not None:
            raise self._error
        return Outcome(self._whole, self._reader.faults, self.latency.whole())

    def stop(self) -> None:
        """Ends after the frames that are under way, and what is written is finished as usual."""
        self._stop.set()
        self._source.close()
        self._input.close()

    def _channel(self, cause: str) -> Channel:
        return FrameSlot(cause, self.latency.drop) if self._source.is_live else FrameQueue(_QUEUED, self.latency.drop)

    def _read(self) -> None:
        try:
            self._whole = self._reader.read(self._offer, self._stop)
            self._input.close()
        except BaseException as error:
            self.fail(error)

    def _offer(self, frame: Frame) -> bool:
        if self._input.put(_Arrived(frame, self._clock.now_s())):
            # Only then is the next one read: in the reader's hand it would get as old as a frame takes.
            self._input.wait_for_room()
            return True
        self.latency.drop(STOPPED)
        return False

    def _compute(self) -> None:
        size = (self._source.height, self._source.width)
        # A live frame is finished before the next is looked at: whatever waited would only be older.
        most = 1
        if isinstance(self._transform, Overlapping) and not self._source.is_live:
            most = self._transform.most_under_way
        under_way: deque[_Begun] = deque()
        while True:
            arrived = self._arrived_before_done() if under_way else self._input.take()
            if arrived is None and not under_way:
                return
            if arrived is None:
                self._pass_on(under_way.popleft())
                continue
            frame = replace(arrived.frame, settings=self.settings.now())
            if (frame.height, frame.width) != size:
                while under_way:
                    self._pass_on(under_way.popleft())
                if self._sink.takes_new_size:  # else it is said where it ends the stream
                    self._tell(f"the picture changes from {size[1]}×{size[0]} to {frame.width}×{frame.height}.")
                size = (frame.height, frame.width)
                self._transform.prepare(*size)
            # Behind the preparation, which is no frame's own work.
            taken_s = self._clock.now_s()
            if isinstance(self._transform, Overlapping):
                self._transform.begin(frame)
            under_way.append(_Begun(frame, arrived.offered_s, taken_s))
            if len(under_way) >= most:
                self._pass_on(under_way.popleft())

    def _arrived_before_done(self) -> _Arrived | None:
        """The next frame, where it comes before the oldest under way is done: neither waits for the other."""
        while isinstance(self._transform, Overlapping) and not self._transform.is_done():
            arrived = self._input.take(_GLANCE_S)
            if arrived is not None or self._input.closed:
                return arrived
        return self._input.take(0)

    def _pass_on(self, begun: _Begun) -> None:
        transform = self._transform
        made = transform.finish() if isinstance(transform, Overlapping) else transform(begun.frame)
        pixels = check_pixels(made, "the transform")
        height, width = pixels.shape[:2]
        before = self._made_size or (height, width)
        if before != (height, width) and not self._sink.takes_new_size:
            raise RedlineError(
                f"the picture changes to {width}×{height}, and {self._sink.name!r} cannot change with it: give --size "
                f"{before[1]}x{before[0]}."
            )
        self._made_size = (height, width)
        copies_s = transform.copies_s if isinstance(transform, TimesCopies) else (0.0, 0.0)
        frame = replace(begun.frame, pixels=pixels)
        passed = _Made(frame, begun.offered_s, begun.taken_s, self._clock.now_s(), copies_s)
        while not self._output.put(passed, self._limits.sink_s) and not self._output.closed:
            self._check_sink()
        self._check_sink()

    def _write(self) -> None:
        is_kept = False
        try:
            try:
                while (made := self._next_made()) is not None:
                    self._sink_since_s = time.monotonic()
                    self._sink.write(made.frame)
                    self._sink_since_s = None
                    self._record(made)
                is_kept = self._error is None or self._source.is_live
            finally:
                self._sink_since_s = time.monotonic()
                if is_kept:
                    self._sink.close(self._whole and self._error is None)
                else:
                    self._sink.abandon()
                self._sink_since_s = None
        except BaseException as error:
            self.fail(error, in_sink=True)

    def _next_made(self) -> _Made | None:
        if not isinstance(self._sink, Idles):
            return self._output.take()
        while (made := self._output.take(_IDLE_S)) is None and not self._output.closed:
            self._sink.idle()
        # One may have come just before the end.
        return made or self._output.take()

    def _record(self, made: _Made) -> None:
        frame, (copy_in_s, copy_out_s), shown_s = made.frame, made.copies_s, self._clock.now_s()
        self.latency.record(
            FrameTimes(
                capture_s=made.offered_s - frame.captured_s,
                wait_s=made.taken_s - made.offered_s,
                copy_in_s=copy_in_s,
                compute_s=made.made_s - made.taken_s - copy_in_s - copy_out_s,
                copy_out_s=copy_out_s,
                display_s=shown_s - made.made_s,
                shown_s=shown_s,
            )
        )

    def fail(self, error: BaseException, in_sink: bool = False) -> None:
        """Ends all threads, from any of them or from outside. The first error is the one that is raised; the others are
        mostly its consequences."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        self._source.close()
        self._input.abandon()
        if self._source.is_live and not in_sink:
            self._output.close()
        else:
            self._output.abandon()

    def _check_sink(self) -> None:
        since_s = self._sink_since_s
        # Wall time, whatever the stream's clock is: a sink hangs in the real world.
        if since_s is not None and time.monotonic() - since_s > self._limits.sink_s:
            raise RedlineError(f"{self._sink.name!r} takes no more frames: one took over {self._limits.sink_s:g} s.")

    def _wait_for_sink(self, writer: threading.Thread) -> None:
        while writer.is_alive():
            self._check_sink()
            writer.join(self._limits.sink_s)

    def _join(self, writer: threading.Thread, reader: threading.Thread) -> None:
        """No thread is left behind, but for one that hangs in a source or sink that is dead."""
        try:
            self._wait_for_sink(writer)
        except RedlineError as error:
            self.fail(error)
        if reader.ident is not None:
            reader.join(self._limits.source_s)
            if reader.is_alive():
                text = f"the source {self._source.name!r} did not let go within {self._limits.source_s:g} s."
                self.fail(RedlineError(text))
