"""The browser's camera as a live source. A channel holds the newest received frame until the stream reads it.

A page that disconnects does not end the stream: it is logged as a fault, and the source waits for the next page.
"""

import threading
from collections.abc import Callable, Generator
from fractions import Fraction
from typing import NamedTuple

import av
from av import VideoFrame

from redline.errors import RedlineError
from redline.machine.channels import Channel
from redline.stream.browser.broadcast import MAX_CAMERA_PIXELS, crop_and_scale
from redline.stream.frames import Clock, Frame
from redline.stream.latency import Latency
from redline.stream.sources import SourceFault
from redline.video.reading import TICK_90KHZ

CONVERSION_BUSY = "conversion busy"
MIN_SIDE, MAX_SIDE = 16, 4096
MAX_LATE_S = 2.0
_NOT_SENDING = "the browser stopped sending."


class _Arrived(NamedTuple):
    image: VideoFrame
    number: int
    captured_s: float


class Lateness:
    """Measures how much longer a frame took to arrive than the fastest frame, by the browser's own timestamps.

    If the clocks of browser and server drift apart, all frames seem to get later and later. Therefore the travel time
    of the fastest frame is assumed to grow by 0.1% of the elapsed time.
    """

    def __init__(self) -> None:
        self._fastest_s: float | None = None
        self._at_s = 0.0

    def of(self, stamp_s: float, arrived_s: float) -> float:
        travel_s = arrived_s - stamp_s
        if self._fastest_s is None:
            self._fastest_s, self._at_s = travel_s, arrived_s
        self._fastest_s = min(travel_s, self._fastest_s + 1e-3 * (arrived_s - self._at_s))
        self._at_s = arrived_s
        return travel_s - self._fastest_s


class CameraFeed:
    """The frames from one page's camera, filled by the network thread.

    The capture time of a frame is its arrival time minus its delay relative to the fastest frame. The time that the
    fastest frame took in camera, browser and network cannot be measured, so it is not included.
    """

    def __init__(self, clock: Clock, latency: Latency) -> None:
        self._clock = clock
        self._channel = Channel[_Arrived](1, latency.drop, overwrite_cause=CONVERSION_BUSY)
        self._arrived = 0
        self._lateness = Lateness()
        self.why_ended = _NOT_SENDING

    def put(self, image: VideoFrame) -> None:
        if image.width * image.height > MAX_CAMERA_PIXELS:
            most = f"at most {MAX_CAMERA_PIXELS:,} pixels"
            raise RedlineError(f"camera frames of {image.width}×{image.height} are too large ({most}).")
        now_s = self._clock.now_s()
        late_s = self._lateness.of(float((image.pts or 0) * TICK_90KHZ), now_s)
        # Frames that queue in the network stay late, but a new connection starts with an empty queue.
        if late_s > MAX_LATE_S:
            raise RedlineError(f"camera frames arrive {late_s:.1f} s late: reconnecting.")
        self._channel.put(_Arrived(image, self._arrived, now_s - late_s))
        self._arrived += 1

    def take(self, timeout_s: float | None) -> _Arrived | None:
        return self._channel.take(timeout_s)

    @property
    def ended(self) -> bool:
        return self._channel.closed

    def end(self, why: str = _NOT_SENDING) -> None:
        if not self._channel.closed:
            self.why_ended = why
        self._channel.close()


class BrowserSource:
    """A page's camera as a source. Crops and scales frames to `height` and `width`; passes each frame to `preview`."""

    name, is_live = "browser", True

    def __init__(
        self,
        height: int,
        width: int,
        rate: Fraction,
        latency: Latency,
        clock: Clock | None = None,
        preview: Callable[[Frame], object] = lambda frame: None,
        silence_s: float = 5.0,
    ) -> None:
        if not all(MIN_SIDE <= side <= MAX_SIDE for side in (height, width)):
            sides = f"sides must have {MIN_SIDE} to {MAX_SIDE} pixels"
            raise RedlineError(f"invalid size {width}×{height} for a browser: {sides}.")
        if not 1 <= rate <= 120:
            raise RedlineError(f"invalid frame rate {float(rate):g} for a browser: it must be from 1 to 120.")
        self.height, self.width, self.rate = height, width, Fraction(rate)
        self._latency, self._clock, self._preview, self._silence_s = latency, clock or Clock(), preview, silence_s
        self._changed = threading.Condition()
        self._feed: CameraFeed | None = None
        self._closed = False

    def connect(self) -> CameraFeed:
        """Returns a feed for a page that starts sending, and ends the feed of the previous page."""
        feed = CameraFeed(self._clock, self._latency)
        with self._changed:
            if self._feed is not None:
                self._feed.end("another page started to send.")
            if self._closed:
                feed.end()
            self._feed = feed
            self._changed.notify_all()
        return feed

    def frames(self) -> Generator[Frame, None, None]:
        feed = self._wait_for_feed()
        # The first frame has no timeout, because a person must press a button. Later, missing frames are a fault.
        timeout_s, first_pts = None, None
        while feed is not None:
            arrived = feed.take(timeout_s)
            if self._closed:
                return
            if arrived is None:
                silent = f"the browser sent no frame for {self._silence_s:g} s."
                raise SourceFault(feed.why_ended if feed.ended else silent)
            timeout_s = self._silence_s
            pts = arrived.image.pts or 0
            first_pts = pts if first_pts is None else first_pts
            try:
                pixels = crop_and_scale(arrived.image, self.height, self.width)
            except (av.FFmpegError, ValueError) as error:
                raise SourceFault("the browser sent a frame that cannot be converted.") from error
            frame = Frame(pixels, arrived.number, pts - first_pts, TICK_90KHZ, arrived.captured_s)
            self._preview(frame)
            yield frame

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._feed is not None:
                self._feed.end()
            self._changed.notify_all()

    def _wait_for_feed(self) -> CameraFeed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._feed is not None and not self._feed.ended))
            return None if self._closed else self._feed
