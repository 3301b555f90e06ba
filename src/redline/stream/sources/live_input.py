"""A camera or a network stream through FFmpeg: opened once, before anything starts, and again after each fault.

Nothing here waits without an end: opening and every read have a time limit, after which the stream counts as lost. The
first opening is kept for the first frames, since a camera cannot be opened twice and a server is slow to.
"""

import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.films import reason, said_rate
from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame
from redline.stream.sources import SourceFault
from redline.stream.sources.video_file import to_pixels, upright

_USUAL_RATE = Fraction(30)
# A stream that cannot be decoded for so many packets will not be later.
_DAMAGED = 600


@dataclass(frozen=True)
class Address:
    """What FFmpeg opens. `name` is for people, and holds no password."""

    url: str
    name: str
    container: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    open_s: float = 10.0
    read_s: float = 5.0


class LiveInput:
    """`length_s` is how long it lasts, where that is known: then its end is no fault."""

    is_live = True

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        self.name, self._address, self._clock = address.name, address, clock or SystemClock()
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._waiting: InputContainer | None = None
        try:
            container = _opened(address)
        except SourceFault as fault:
            # Before the start nobody waits for it to come back.
            raise RedlineError(str(fault)) from fault
        try:
            stream = _pictures(container, address)
            self.rate = said_rate(stream) or _USUAL_RATE
            self.length_s = Fraction(container.duration, av.time_base) if container.duration else None
            self._first = _first_frame(container, stream, address)
        except BaseException as error:
            container.close()
            if isinstance(error, SourceFault):
                raise RedlineError(str(error)) from error
            raise
        self.height, self.width = upright(self._first.rotation, self._first.height, self._first.width)
        self._waiting = container

    def frames(self) -> Generator[Frame, None, None]:
        with self._lock:
            container, self._waiting = self._waiting, None
        first = self._first if container is not None else None
        with closing(container or _opened(self._address)) as container:
            stream = _pictures(container, self._address)
            time_base = Fraction(stream.time_base or Fraction(1, av.time_base))
            usual = max(1, round(1 / self.rate / time_base))
            to_rgb, last, index = VideoReformatter(), None, 0
            for found, captured_s in self._found(container, stream, first):
                if self._closed.is_set():
                    return
                if found.is_corrupt:
                    continue
                pts = found.pts
                if pts is None or (last is not None and pts <= last):
                    pts = 0 if last is None else last + usual
                last = pts
                yield Frame(to_pixels(found, to_rgb), index, pts, time_base, captured_s, found.duration or 0)
                index += 1
        if self.length_s is None and not self._closed.is_set():
            raise SourceFault(f"{self.name} has ended.")

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            container, self._waiting = self._waiting, None
        if container is not None:
            container.close()

    def _found(
        self, container: InputContainer, stream: VideoStream, first: VideoFrame | None
    ) -> Iterator[tuple[VideoFrame, float]]:
        """Frames, each with the moment at which its last bytes came."""
        if first is not None:
            yield first, self._clock.now_s()
        failed = 0
        packets = container.demux(stream)
        while not self._closed.is_set():
            try:
                packet = next(packets, None)
            except (av.FFmpegError, OSError) as error:
                raise SourceFault(f"{self.name} is lost: {_why(error, self._address.read_s)}.") from error
            if packet is None:
                return
            captured_s = self._clock.now_s()
            try:
                decoded = packet.decode()
            except (av.FFmpegError, OSError) as error:
                # After a loss on the way, pictures are whole again from the next key frame on.
                failed += 1
                if failed > _DAMAGED:
                    raise SourceFault(f"the pictures of {self.name} cannot be decoded: {reason(error)}.") from error
                continue
            for frame in decoded:
                if isinstance(frame, VideoFrame):
                    failed = 0
                    yield frame, captured_s


def _opened(address: Address) -> InputContainer:
    limits = (address.open_s, address.read_s)
    try:
        return av.open(address.url, format=address.container, options=dict(address.options), timeout=limits)
    except (av.FFmpegError, OSError) as error:
        raise SourceFault(f"{address.name} cannot be opened: {_why(error, address.open_s)}.") from error


def _pictures(container: InputContainer, address: Address) -> VideoStream:
    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        raise RedlineError(f"{address.name} has no moving picture.")
    if stream.codec_context is None:
        raise RedlineError(f"the codec of {address.name} cannot be read here.")
    # Threads stay as PyAV has them, over slices: those that work on several frames at once give each of them later.
    return stream


def _first_frame(container: InputContainer, stream: VideoStream, address: Address) -> VideoFrame:
    packets = container.demux(stream)
    for _ in range(_DAMAGED):
        try:
            packet = next(packets, None)
        except (av.FFmpegError, OSError) as error:
            raise SourceFault(f"{address.name} gives no picture: {_why(error, address.read_s)}.") from error
        if packet is None:
            break
        try:
            decoded = packet.decode()
        except (av.FFmpegError, OSError):
            continue
        for frame in decoded:
            if isinstance(frame, VideoFrame) and not frame.is_corrupt:
                return frame
    raise RedlineError(f"no picture of {address.name} can be decoded ({stream.codec_context.name}).")


def _why(error: Exception, limit_s: float) -> str:
    # FFmpeg says of a read that was ended for its time that it was asked to stop.
    return f"no answer within {limit_s:g} s" if isinstance(error, av.ExitError) else reason(error)
