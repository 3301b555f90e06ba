"""The browser's camera as a live source: what arrives is put on a line of one place, from which the stream reads.

A page that comes and goes does not end the stream. Losing it is a fault, told once; then the source waits, for as long
as it takes, and goes on with the first picture of the next page.
"""

import threading
from collections.abc import Callable, Generator
from fractions import Fraction
from typing import NamedTuple

import av
from av import VideoFrame

from redline.errors import RedlineError
from redline.stream.browser.images import MOST_SENT_PIXELS, crop_and_scale
from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.slot import FrameSlot
from redline.stream.sources import Source, SourceFault

CONVERSION_BUSY = "conversion busy"
SMALLEST_SIDE, LARGEST_SIDE = 16, 4096
MOST_LATE_S = 2.0
_NOT_SENDING = "the browser has stopped sending."
_TIME_BASE = Fraction(1, 90_000)


class _Arrived(NamedTuple):
    picture: VideoFrame
    number: int
    captured_s: float


class Lateness:
    """How much longer a picture was under way than the quickest one, by the browser's own time stamps.

    The clocks of two machines run apart by some parts in a million: what counts as quickest rises by a thousandth.
    """

    def __init__(self) -> None:
        self._quickest_s: float | None = None
        self._at_s = 0.0

    def of(self, stamp_s: float, arrived_s: float) -> float:
        under_way_s = arrived_s - stamp_s
        if self._quickest_s is None:
            self._quickest_s, self._at_s = under_way_s, arrived_s
        self._quickest_s = min(under_way_s, self._quickest_s + 1e-3 * (arrived_s - self._at_s))
        self._at_s = arrived_s
        return under_way_s - self._quickest_s


class CameraFeed:
    """One page's connection; fed by the thread of the network. A frame was captured when it arrived here, decoded, less
    what it was later than the quickest one. What the quickest took, in camera, browser and network, cannot be known."""

    def __init__(self, clock: Clock, latency: Latency) -> None:
        self._clock = clock
        self._slot: FrameSlot[_Arrived] = FrameSlot(CONVERSION_BUSY, latency.drop)
        self._arrived = 0
        self._lateness = Lateness()
        self.why_ended = _NOT_SENDING

    @property
    def arrived(self) -> int:
        return self._arrived

    def put(self, picture: VideoFrame) -> None:
        if picture.width * picture.height > MOST_SENT_PIXELS:
            raise RedlineError(f"a picture of {picture.width}×{picture.height} is too large to be sent from a browser.")
        now_s = self._clock.now_s()
        late_s = self._lateness.of(float((picture.pts or 0) * _TIME_BASE), now_s)
        # A queue that built up before us is never made up for, but a new connection starts without one.
        if late_s > MOST_LATE_S:
            raise RedlineError(f"pictures come {late_s:.1f} s late: the connection is made anew.")
        self._slot.put(_Arrived(picture, self._arrived, now_s - late_s))
        self._arrived += 1

    def take(self, timeout_s: float | None) -> _Arrived | None:
        return self._slot.take(timeout_s)

    @property
    def ended(self) -> bool:
        return self._slot.closed

    def end(self, why: str = _NOT_SENDING) -> None:
        if not self._slot.closed:
            self.why_ended = why
        self._slot.close()


class BrowserSource:
    """Frames are of `height` and `width` whatever the camera gives. `seen` is given every frame, for viewers."""

    is_live = True

    def __init__(
        self,
        name: str,
        height: int,
        width: int,
        rate: Fraction,
        latency: Latency,
        clock: Clock | None = None,
        seen: Callable[[Frame], object] = lambda frame: None,
        silence_s: float = 5.0,
    ) -> None:
        if not all(SMALLEST_SIDE <= side <= LARGEST_SIDE for side in (height, width)):
            raise RedlineError(f"sides of {SMALLEST_SIDE} to {LARGEST_SIDE} px can be sent, not {width}×{height}.")
        if not 1 <= rate <= 120:
            raise RedlineError(f"a browser sends 1 to 120 frames a second, not {float(rate):g}.")
        self.name, self.height, self.width, self.rate = name, height, width, Fraction(rate)
        self._latency, self._clock, self._seen, self._silence_s = latency, clock or SystemClock(), seen, silence_s
        self._changed = threading.Condition()
        self._line: CameraFeed | None = None
        self._closed = False

    def connect(self) -> CameraFeed:
        """A line for a page that begins to send; that of the page before has ended, or ends now."""
        line = CameraFeed(self._clock, self._latency)
        with self._changed:
            if self._line is not None:
                self._line.end("another page has begun to send.")
            if self._closed:
                line.end()
            self._line = line
            self._changed.notify_all()
        return line

    def frames(self) -> Generator[Frame, None, None]:
        line = self._wait_for_line()
        # The first picture may take as long as a person needs to press a button; then silence is a fault.
        timeout_s, first_pts = None, None
        while line is not None:
            arrived = line.take(timeout_s)
            if self._closed:
                return
            if arrived is None:
                raise SourceFault(line.why_ended if line.ended else f"the browser is silent for {self._silence_s:g} s.")
            timeout_s = self._silence_s
            pts = arrived.picture.pts or 0
            first_pts = pts if first_pts is None else first_pts
            try:
                pixels = crop_and_scale(arrived.picture, self.height, self.width)
            except (av.FFmpegError, ValueError) as error:
                raise SourceFault("the browser sent a picture that cannot be read.") from error
            frame = Frame(pixels, arrived.number, pts - first_pts, _TIME_BASE, arrived.captured_s)
            self._seen(frame)
            yield frame

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._line is not None:
                self._line.end()
            self._changed.notify_all()

    def _wait_for_line(self) -> CameraFeed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._line is not None and not self._line.ended))
            return None if self._closed else self._line


class Previewed:
    """Another source, of which `seen` is given every frame besides: so that the page shows the input too. Nothing is
    read before `begin` is set."""

    def __init__(self, source: Source, seen: Callable[[Frame], object], begin: threading.Event | None = None) -> None:
        self.inner, self._seen, self._begin = source, seen, begin
        self.name, self.is_live, self.rate = source.name, source.is_live, source.rate

    @property
    def height(self) -> int:
        return self.inner.height

    @property
    def width(self) -> int:
        return self.inner.width

    def frames(self) -> Generator[Frame, None, None]:
        if self._begin is not None:
            self._begin.wait()
        frames = self.inner.frames()
        try:
            for frame in frames:
                self._seen(frame)
                yield frame
        finally:
            frames.close()

    def close(self) -> None:
        self.inner.close()
        if self._begin is not None:
            self._begin.set()
