"""A camera or a network stream through FFmpeg, opened before the stream starts and again after each fault.

Opening and every read have a timeout, after which the stream counts as lost. The first connection stays open and gives
the first frames, because a camera cannot be opened twice and a server is slow to open; frames that arrived in the
meantime are skipped. After a fault, a video on a server continues after the last frame that was received.
"""

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from urllib.parse import urlsplit

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.stream.frames import Clock, Frame
from redline.stream.sources import Source, SourceFault
from redline.stream.sources.video_file import DAMAGED, hdr_notes, pixel_aspect, to_pixels, upright
from redline.stream.sources.wrappers import Paced
from redline.video.reading import TICK_90KHZ, declared_rate, intact_frame, reason

_DEFAULT_RATE = Fraction(30)
# FFmpeg's flag of formats without timestamps, such as Motion JPEG, for which it assumes 25 frames per second.
_UNTIMED = 0x80
# For these formats and codecs, FFmpeg returns a frame only when the next one begins.
_DELAYED, _DELAYED_CODECS = ("rtsp", "mpegts"), ("h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video")
# A video may end this much before its declared duration, because of rounding.
_MISSING_S = 1
# A packet for which the reader waited this long is new, not backlog. Two such packets in a row are required, because
# on a busy machine a single read may take long.
_WAITED_S, _IN_A_ROW = 0.004, 2
# The backlog is skipped for at most this long, because a source that sends in bursts, or faster than it is read, may
# never make the reader wait.
_LONGEST_S = 3.0
SCHEMES = ("rtsp", "rtsps", "http", "https", "rtmp", "srt", "udp")
# A playlist from the network may refer to other addresses, but not to local files.
_PROTOCOLS = "crypto,data,http,https,httpproxy,rtmp,rtmps,rtmpt,rtp,srtp,srt,tcp,tls,udp"
# Uses TCP, because over UDP a lost packet would corrupt all frames until the next key frame.
_RTSP = {"rtsp_transport": "tcp"}
# The stream fails after more consecutive packets than this that cannot be decoded.
_MAX_UNDECODABLE = 600
_DEVICES = Path("/dev")


@dataclass(frozen=True)
class Address:
    """An address that FFmpeg opens. `name` is shown in messages and contains no password. An `is_live` stream continues
    while nobody reads it."""

    url: str
    name: str
    container: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    open_s: float = 10.0
    read_s: float = 5.0
    is_live: bool = False


class Backlog:
    """Detects the end of the backlog that a live source sent while it was opened and the model was set up.

    The backlog is skipped, because its duration would otherwise add to the latency of every later frame. A stream does
    not say how old its frames are, but packets of the backlog are available immediately, while the reader has to wait
    for new ones. Uses wall time even if the stream's clock is simulated, because the network is real.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._waits = 0

    @property
    def is_over(self) -> bool:
        return self._waits >= _IN_A_ROW or time.monotonic() - self._began_s > _LONGEST_S

    def read(self, waited_s: float) -> None:
        """Records that the reader waited this long for a packet."""
        if not self.is_over:
            self._waits = self._waits + 1 if waited_s >= _WAITED_S else 0


class LiveInput:
    """A live source. `length_s` is the duration if the stream is a video of known length, whose end is not a fault.

    `drop` is called for each damaged frame. Frames are scaled from `sent_size` to `size` (height, width) in the
    same way as by `VideoFile`.
    """

    is_live = True

    def __init__(
        self,
        address: Address,
        clock: Clock | None = None,
        drop: Callable[[str], None] = lambda cause: None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.name, self._address, self._clock, self._drop = address.name, address, clock or Clock(), drop
        self._size = size
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._waiting: InputContainer | None = None
        self._last: int | None = None
        self._next_index = 0
        container = None
        try:
            container = _opened(address)
            stream = _video_stream(container, address)
            self.rate = declared_rate(stream) or _DEFAULT_RATE
            self.length_s = Fraction(container.duration, av.time_base) if container.duration else None
            self.has_audio = bool(container.streams.audio)
            self._first = _first_frame(container, stream, address)
            to_pixels(self._first, VideoReformatter())  # raises now if frames cannot be converted
        except BaseException as error:
            if container is not None:
                container.close()
            if isinstance(error, SourceFault):
                # Before the stream starts, a fault is raised as an error without a retry.
                raise RedlineError(str(error)) from error
            raise
        self.sent_size = upright(self._first.rotation, self._first.height, self._first.width)
        self.height, self.width = size or self.sent_size
        self.pixel_aspect = pixel_aspect(stream, self._first.rotation)
        self.notes = hdr_notes(self._first, self.name)
        self._waiting = container

    def frames(self) -> Generator[Frame, None, None]:
        with self._lock:
            container, self._waiting = self._waiting, None
        first = self._first if container is not None else None
        is_video = self.length_s is not None
        if not is_video:
            self._last, self._next_index = None, 0
        with closing(container or self._reopened()) as container:
            stream = _video_stream(container, self._address)
            is_untimed = not is_video and bool(container.format.flags & _UNTIMED)
            time_base = TICK_90KHZ if is_untimed else Fraction(stream.time_base or Fraction(1, av.time_base))
            default_duration = max(1, round(1 / self.rate / time_base))
            to_rgb, before_s, shown = VideoReformatter(), self._clock.now_s(), self._last
            for decoded, captured_s in self._decoded(container, stream, first):
                if self._closed.is_set():
                    return
                pts = None if is_untimed else decoded.pts
                if pts is not None and shown is not None and pts <= shown:
                    continue
                if decoded.is_corrupt:
                    if self._last is not None:
                        self._drop(DAMAGED)
                    continue
                if self._last is None:
                    pts = pts or 0
                elif pts is None or pts <= self._last:
                    passed = default_duration if is_video else round(Fraction(captured_s - before_s) / time_base)
                    pts = self._last + max(1, passed)
                duration = 0 if is_untimed else decoded.duration or 0
                pixels, aspect = to_pixels(decoded, to_rgb, self._size), self.pixel_aspect
                frame = Frame(pixels, self._next_index, pts, time_base, captured_s, duration, pixel_aspect=aspect)
                self._last, self._next_index, before_s = pts, self._next_index + 1, captured_s
                yield frame
            if self._closed.is_set():
                return
            if not is_video:
                raise SourceFault(f"{self.name} has ended.")
            self._check_end(stream, time_base, shown)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            container, self._waiting = self._waiting, None
        if container is not None:
            container.close()

    def _reopened(self) -> InputContainer:
        container = _opened(self._address)
        if self._last is None:
            return container
        try:
            container.seek(self._last, stream=_video_stream(container, self._address))
        except (av.FFmpegError, OSError):
            # A server that cannot seek sends from the start; frames that were already shown are skipped.
            container.close()
            return _opened(self._address)
        return container

    def _check_end(self, stream: VideoStream, time_base: Fraction, shown: int | None) -> None:
        """Raises SourceFault if the video ended early, because a server may stop sending without an error.

        If a connection gave no new frame, the video is assumed to have ended.
        """
        if not stream.duration or self._last is None or self._last == shown:
            return
        length_s = ((stream.start_time or 0) + stream.duration) * time_base
        if length_s - self._last * time_base > _MISSING_S:
            came_s = float(self._last * time_base)
            raise SourceFault(f"{self.name} ended early at {came_s:.1f} s of {float(length_s):.1f} s.")

    def _decoded(
        self, container: InputContainer, stream: VideoStream, first: VideoFrame | None
    ) -> Iterator[tuple[VideoFrame, float]]:
        """Yields each frame with the arrival time of its last bytes, or of its first bytes if only that is known."""
        backlog = Backlog() if self._address.is_live and self.length_s is None else None
        if first is not None and backlog is None:
            yield first, self._clock.now_s()
        undecodable, read_s = 0, self._address.read_s
        is_delayed = container.format.name in _DELAYED and stream.codec_context.name in _DELAYED_CODECS
        came_s = self._clock.now_s()
        packets = container.demux(stream)
        while not self._closed.is_set():
            asked_s = time.monotonic()
            if (packet := _next(packets, f"{self.name} is lost", read_s)) is None:
                return
            waited_s = time.monotonic() - asked_s
            # FFmpeg returns a delayed packet only when the next packet begins to arrive. Therefore the packet returned
            # now began to arrive when the packet before it was returned, at `before_s`.
            before_s, came_s = came_s, self._clock.now_s()
            captured_s = before_s if is_delayed else came_s
            if backlog is not None:
                backlog.read(waited_s)
            try:
                decoded = stream.decode(packet)
            except (av.FFmpegError, OSError) as error:
                # Continues, because after packet loss frames are intact again from the next key frame.
                undecodable += 1
                if self._last is not None:
                    self._drop(DAMAGED)
                if undecodable > _MAX_UNDECODABLE:
                    raise SourceFault(f"the frames of {self.name} cannot be decoded: {reason(error)}.") from error
                continue
            for frame in decoded:
                undecodable = 0
                if backlog is None or backlog.is_over:
                    yield frame, captured_s
            if waited_s >= read_s:
                # FFmpeg ends the packets without an error when a read times out.
                raise SourceFault(f"{self.name} is lost: no answer within {read_s:g} s.")


def open_network(
    url: str,
    clock: Clock | None = None,
    open_s: float = 10.0,
    read_s: float = 5.0,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> Source:
    """Opens an RTSP camera, an MJPEG or HLS address, or a video on a server, which is played at its frame rate."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RedlineError(f"invalid address {url!r}: {error}.") from error
    if parts.scheme not in SCHEMES or not host:
        raise RedlineError(f"invalid address {url!r}: it must start with one of {', '.join(SCHEMES)}, and name a host.")
    options = {"protocol_whitelist": _PROTOCOLS, **(_RTSP if parts.scheme.startswith("rtsp") else {})}
    # Messages must not show user names and passwords of addresses.
    name = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    source = LiveInput(Address(url, repr(name), None, options, open_s, read_s, is_live=True), clock, drop, size)
    return source if source.length_s is None else Paced(source, clock, drop)


def _opened(address: Address) -> InputContainer:
    limits = (address.open_s, address.read_s)
    try:
        return av.open(address.url, format=address.container, options=dict(address.options), timeout=limits)
    except (av.FFmpegError, OSError) as error:
        raise SourceFault(f"{address.name} cannot be opened: {_why(error, address.open_s, address.url)}.") from error


def _video_stream(container: InputContainer, address: Address) -> VideoStream:
    stream = container.streams.best("video")
    # A restarting camera may send audio before video, so a missing video stream is retried.
    if not isinstance(stream, VideoStream):
        raise SourceFault(f"{address.name} has no video stream.")
    if stream.codec_context is None:
        raise SourceFault(f"{address.name}: there is no decoder for its codec.")
    # Keeps slice threads, PyAV's default, because frame threads delay every frame.
    return stream


def _first_frame(container: InputContainer, stream: VideoStream, address: Address) -> VideoFrame:
    packets = container.demux(stream)
    read = iter(lambda: _next(packets, f"{address.name} sends no frame", address.read_s), None)
    frame = intact_frame(stream, read, _MAX_UNDECODABLE)
    if frame is None:
        raise RedlineError(f"no frame of {address.name} can be decoded ({stream.codec_context.name}).")
    return frame


def _next(packets: Iterator[Packet], fault: str, read_s: float) -> Packet | None:
    try:
        return next(packets, None)
    except (av.FFmpegError, OSError) as error:
        raise SourceFault(f"{fault}: {_why(error, read_s)}.") from error


def _why(error: Exception, limit_s: float, url: str = "") -> str:
    # FFmpeg reports a timeout as a requested exit.
    if isinstance(error, av.ExitError):
        return f"no answer within {limit_s:g} s"
    host = urlsplit(url).hostname if "://" in url else None
    if host and getattr(error, "errno", None) == errno.EIO and not _is_known(host):
        return f"unknown host {host!r}"
    return reason(error)


def _is_known(host: str) -> bool:
    """Resolves the host, because FFmpeg reports an unknown host as a plain I/O error."""
    with suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


@dataclass(frozen=True)
class CameraMode:
    """The mode requested from a camera, which may not support it.

    `size` is (height, width). `pixel_format` is `mjpeg` or `yuyv422`; only `mjpeg` is fast at large sizes.
    """

    size: tuple[int, int] | None = None
    rate: Fraction | None = None
    pixel_format: str | None = None

    @property
    def options(self) -> dict[str, str]:
        options = {
            "video_size": None if self.size is None else f"{self.size[1]}x{self.size[0]}",
            "framerate": None if self.rate is None else str(self.rate),
            "input_format": self.pixel_format,
        }
        return {name: value for name, value in options.items() if value is not None}


def open_webcam(
    device: str | int = 0,
    clock: Clock | None = None,
    mode: CameraMode | None = None,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> LiveInput:
    """Opens a camera by its number or device file.

    The driver selects the nearest supported mode. If it differs from the request, a note says so.
    """
    if not sys.platform.startswith("linux"):
        raise RedlineError("webcam needs Video4Linux, which only Linux has: use browser as the source.")
    path = _DEVICES / f"video{device}" if isinstance(device, int) else Path(device)
    if not path.exists():
        cameras = sorted(str(found) for found in _DEVICES.glob("video*"))
        raise RedlineError(f"there is no camera {str(path)!r} (found: {', '.join(cameras) or 'none'}).")
    if not path.is_char_device():
        raise RedlineError(f"{str(path)!r} is not a camera.")
    mode = mode or CameraMode()
    address = Address(str(path), f"the camera {str(path)!r}", "video4linux2", mode.options, is_live=True)
    camera = LiveInput(address, clock, drop, size)
    given, rate = camera.sent_size, camera.rate
    if mode.size not in (None, given) or mode.rate not in (None, rate):
        camera.notes += (
            f"{camera.name} sends {given[1]}×{given[0]} at {float(rate):g} frames/s instead of the requested mode.",
        )
    return camera
