"""Runs source → transform → sink: one thread reads, the caller's thread computes, and one thread writes.

All frames of a file are processed, in order. With a live source, the model takes the newest frame and older ones are
dropped, so that frames do not age in a queue if the model or the sink is slow. An error in any thread ends all three
and is raised by `run`. After an error, the sink keeps what it has recorded from a live source, if it can, but deletes
the unfinished output of a file.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from redline.errors import RedlineError
from redline.machine.channels import STOPPED, Channel
from redline.stream.engine import Engine
from redline.stream.frames import Clock, Frame, check_pixels
from redline.stream.latency import FrameTimes, Latency, Report
from redline.stream.settings import LiveSettings
from redline.stream.sinks import Sink
from redline.stream.sources import Source, SourceFault

COMPUTE_BUSY, SINK_BUSY = "compute busy", "sink busy"
# The queue length that keeps three threads busy; longer queues would only add latency.
_QUEUE_SIZE = 1
_IDLE_S = 0.05
# How often `is_done` is polled while the next frame is awaited: a small part of the shortest frame time.
_POLL_S = 1e-4


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
                # The exponent is bounded, because the power would overflow after a very long outage.
                delay_s = min(self._backoff.longest_s, self._backoff.first_s * self._backoff.factor ** min(attempt, 64))
                attempt += 1
                self._continuous.interrupt()
                self._log(f"{fault} Trying again in {delay_s:g} s.")
                self._clock.wait(delay_s, stop)
        return False


class _ContinuousFrames:
    """Makes indices and times continue after a fault, although the source restarts at 0.

    A source that continues with the next index and time is left unchanged.
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


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds: for the sink to write one frame, and for the source to end after a stop."""

    sink_s: float = 60.0
    source_s: float = 15.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `complete` is True if the source ended and was not stopped; `faults` counts lost connections."""

    complete: bool
    faults: int
    report: Report


class _Timed(NamedTuple):
    """A frame, and the times at which it entered the model's queue and its computation began and ended."""

    frame: Frame
    offered_s: float
    begun_s: float = 0.0
    computed_s: float = 0.0
    copies_s: tuple[float, float] = (0.0, 0.0)


@dataclass(eq=False)
class Pipeline:
    """Runs one stream, once. `settings`, `stop` and `fail` may be used from any thread while it runs.

    `log` receives messages for the user, from the thread in which they arise.
    """

    source: Source
    transform: Engine
    sink: Sink
    _: KW_ONLY
    settings: LiveSettings = field(default_factory=LiveSettings)
    latency: Latency = field(default_factory=Latency)
    clock: Clock = Clock()
    backoff: Backoff = Backoff()
    limits: Limits = Limits()
    log: Callable[[str], None] = lambda message: None

    def __post_init__(self) -> None:
        self._idle: Callable[[], None] | None = getattr(self.sink, "idle", None)
        self._reader = Reader(self.source, self.clock, self.backoff, self.log)
        self._input: Channel[_Timed] = self._channel(COMPUTE_BUSY)
        self._output: Channel[_Timed] = self._channel(SINK_BUSY)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._error: BaseException | None = None
        self._started = self._complete = False
        self._sink_since_s: float | None = None
        self._output_size: tuple[int, int] | None = None

    def run(self) -> Outcome:
        """Runs until the source ends or `stop` is called."""
        if self._started:
            raise RedlineError("a pipeline runs only once: create another one.")
        self._started = True
        writer, reader = (threading.Thread(target=work, daemon=True) for work in (self._write, self._read))
        try:
            writer.start()
            self.transform.prepare(self.source.height, self.source.width)
            reader.start()
            self._compute()
            self._output.close()
            self._wait_for_sink(writer)
        except BaseException as error:
            self.fail(error)
        self._join(writer, reader)
        if self._error is not None:
            raise self._error
        return Outcome(self._complete, self._reader.faults, self.latency.report_all())

    def stop(self) -> None:
        """Stops reading. Frames in flight are completed and the sink finishes its output as usual."""
        self._stop.set()
        self.source.close()
        self._input.close()

    def _channel(self, cause: str) -> Channel:
        return Channel(_QUEUE_SIZE, self.latency.drop, overwrite_cause=cause if self.source.is_live else None)

    def _read(self) -> None:
        try:
            self._complete = self._reader.read(self._offer, self._stop)
            self._input.close()
        except BaseException as error:
            self.fail(error)

    def _offer(self, frame: Frame) -> bool:
        if self._input.put(_Timed(frame, self.clock.now_s())):
            # Reads the next frame only when the queue has room, because a frame would age while the reader waits.
            self._input.wait_for_room()
            return True
        self.latency.drop(STOPPED)
        return False

    def _compute(self) -> None:
        transform, size = self.transform, (self.source.height, self.source.width)
        # Finishes each live frame before it takes the next one, because a frame taken early would age in flight.
        max_in_flight = 1 if self.source.is_live else transform.max_in_flight
        in_flight: deque[_Timed] = deque()
        while True:
            queued = self._next_before_done() if in_flight else self._input.take()
            if queued is None:
                if not in_flight:
                    return
                self._finish(in_flight.popleft())
                continue
            frame = replace(queued.frame, settings=self.settings.now())
            if (frame.height, frame.width) != size:
                while in_flight:
                    self._finish(in_flight.popleft())
                if self.sink.takes_new_size:  # otherwise `_finish` raises an error that says so
                    self.log(f"the frame size changes from {size[1]}×{size[0]} to {frame.width}×{frame.height}.")
                size = (frame.height, frame.width)
                transform.prepare(*size)
            # The time is taken after the preparation, which is not part of the computation of this frame.
            begun_s = self.clock.now_s()
            transform.begin(frame)
            in_flight.append(_Timed(frame, queued.offered_s, begun_s))
            if len(in_flight) >= max_in_flight:
                self._finish(in_flight.popleft())

    def _next_before_done(self) -> _Timed | None:
        """Returns the next frame if one comes before the oldest frame in flight is done."""
        while not self.transform.is_done():
            queued = self._input.take(_POLL_S)
            if queued is not None or self._input.closed:
                return queued
        return self._input.take(0)

    def _finish(self, begun: _Timed) -> None:
        pixels = check_pixels(self.transform.finish(), "the transform")
        height, width = pixels.shape[:2]
        before = self._output_size or (height, width)
        if before != (height, width) and not self.sink.takes_new_size:
            raise RedlineError(
                f"the frame size changes to {width}×{height}, which {self.sink.name!r} does not support: give --size "
                f"{before[1]}x{before[0]}."
            )
        self._output_size = (height, width)
        frame = replace(begun.frame, pixels=pixels)
        result = _Timed(frame, begun.offered_s, begun.begun_s, self.clock.now_s(), self.transform.copies_s)
        while not self._output.put(result, self.limits.sink_s) and not self._output.closed:
            self._check_sink()
        self._check_sink()

    def _write(self) -> None:
        is_kept = False
        try:
            try:
                while (computed := self._next_computed()) is not None:
                    self._sink_since_s = time.monotonic()
                    self.sink.write(computed.frame)
                    self._sink_since_s = None
                    self._record(computed)
                is_kept = self._error is None or self.source.is_live
            finally:
                self._sink_since_s = time.monotonic()
                if is_kept:
                    self.sink.close(self._complete and self._error is None)
                else:
                    self.sink.abandon()
                self._sink_since_s = None
        except BaseException as error:
            self.fail(error, in_sink=True)

    def _next_computed(self) -> _Timed | None:
        if self._idle is None:
            return self._output.take()
        while (computed := self._output.take(_IDLE_S)) is None and not self._output.closed:
            self._idle()
        # Tries once more, because a frame may have arrived just before the channel was closed.
        return computed or self._output.take()

    def _record(self, computed: _Timed) -> None:
        (copy_in_s, copy_out_s), shown_s = computed.copies_s, self.clock.now_s()
        self.latency.record(
            FrameTimes(
                capture_s=computed.offered_s - computed.frame.captured_s,
                wait_s=computed.begun_s - computed.offered_s,
                copy_in_s=copy_in_s,
                compute_s=computed.computed_s - computed.begun_s - copy_in_s - copy_out_s,
                copy_out_s=copy_out_s,
                display_s=shown_s - computed.computed_s,
                shown_s=shown_s,
            )
        )

    def fail(self, error: BaseException, in_sink: bool = False) -> None:
        """Ends all threads. `run` raises the first error; later errors are mostly consequences of it."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        self.source.close()
        self._input.abandon()
        if self.source.is_live and not in_sink:
            self._output.close()
        else:
            self._output.abandon()

    def _check_sink(self) -> None:
        since_s = self._sink_since_s
        # Uses wall time even if the pipeline's clock is simulated, because a hung sink hangs in real time.
        if since_s is not None and time.monotonic() - since_s > self.limits.sink_s:
            raise RedlineError(f"{self.sink.name!r} is hung: one frame took over {self.limits.sink_s:g} s to write.")

    def _wait_for_sink(self, writer: threading.Thread) -> None:
        while writer.is_alive():
            self._check_sink()
            writer.join(self.limits.sink_s)

    def _join(self, writer: threading.Thread, reader: threading.Thread) -> None:
        """Joins both threads, except one that hangs in its source or sink."""
        try:
            self._wait_for_sink(writer)
        except RedlineError as error:
            self.fail(error)
        if reader.ident is not None:
            reader.join(self.limits.source_s)
            if reader.is_alive():
                text = f"the source {self.source.name!r} did not stop within {self.limits.source_s:g} s."
                self.fail(RedlineError(text))
