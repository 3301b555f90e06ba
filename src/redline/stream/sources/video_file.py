"""A film from a file, every picture once and at its exact time, whether these come steadily or not."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame

# Broadcast containers count from an arbitrary time; a film that starts there would start with nothing.
_CLOCK_OF_THEIR_OWN = ("mpegts", "mpeg", "mpegtsraw")
_TICK_90KHZ = Fraction(1, 90_000)
_DAMAGED_START = 300
_FASTEST = 1000
_UNSPECIFIED = 2
# Swscale's default repeats colour samples instead of interpolating them, and a model would see the steps.
_SMOOTH_COLOUR = Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND


class VideoFile:
    """`origin_s` is the time at which the film begins on its own clock. Damaged pictures are an error."""

    is_live = False

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path, self.name = path, path.name
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        with _opened(path) as container:
            stream = _film(container, path)
            first = _first_frame(container, stream, path)
            self.height, self.width = _upright(first.rotation, first.height, first.width)
            self.rate = _rate(stream)
            start = container.start_time if container.format.name in _CLOCK_OF_THEIR_OWN else None
            self.origin_s = round(Fraction(start or 0, av.time_base) / _TICK_90KHZ) * _TICK_90KHZ
            self.has_sound = bool(container.streams.audio)

    def frames(self) -> Generator[Frame, None, None]:
        last: int | None = None
        index = 0
        to_rgb = VideoReformatter()
        with _opened(self.path) as container:
            stream = _film(container, self.path)
            # Decoders that work ahead in threads make up for the time that the model takes.
            stream.thread_type = "AUTO"
            time_base = Fraction(stream.time_base or Fraction(1, av.time_base))
            usual = max(1, round(1 / self.rate / time_base))
            captured_s = self._clock.now_s()
            for found in self._decoded(container, stream):
                if self._closed.is_set():
                    return
                if found.is_corrupt:
                    if last is None:
                        continue
                    raise RedlineError(f"a picture of {self.name!r} is damaged at {_seconds(last * time_base)}.")
                pts = found.pts
                if pts is None or (last is not None and pts <= last):
                    # Films that were cut badly repeat times: the next free place keeps order and number.
                    pts = 0 if last is None else last + (usual if pts is None else 1)
                last = pts
                yield Frame(_pixels(found, to_rgb), index, pts, time_base, captured_s, found.duration or 0)
                index += 1
                captured_s = self._clock.now_s()

    def close(self) -> None:
        self._closed.set()

    def _decoded(self, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
        met = False
        for packet in _packets(container, stream, self.name):
            try:
                decoded = packet.decode()
            except (av.FFmpegError, OSError) as error:
                if met:
                    raise RedlineError(f"a picture of {self.name!r} cannot be decoded: {_reason(error)}.") from error
                # A recording may start between two key frames.
                continue
            for frame in decoded:
                if isinstance(frame, VideoFrame):
                    met = met or not frame.is_corrupt
                    yield frame


def _packets(container: InputContainer, stream: VideoStream, name: str) -> Iterator[av.Packet]:
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except (av.FFmpegError, OSError) as error:
            raise RedlineError(f"{name!r} cannot be read to its end: {_reason(error)}.") from error
        if packet is None:
            return
        yield packet


@contextmanager
def _opened(path: Path) -> Iterator[InputContainer]:
    if not path.exists():
        raise RedlineError(f"{str(path)!r} does not exist.")
    if path.is_dir():
        raise RedlineError(f"{str(path)!r} is a folder, not a film.")
    try:
        # Without the protocol's name, a file called `concat:…` or `http:…` would be something else.
        container = av.open(f"file:{path}", metadata_errors="surrogateescape")
    except PermissionError as error:
        raise RedlineError(f"cannot read {str(path)!r}: {_reason(error)}.") from error
    except (av.FFmpegError, OSError) as error:
        empty = path.is_file() and path.stat().st_size == 0
        why = "is empty" if empty else "is no film that can be read, or its index is missing"
        raise RedlineError(f"{path.name!r} {why}.") from error
    with container:
        yield container


def _film(container: InputContainer, path: Path) -> VideoStream:
    stream = container.streams.best("video")
    # A song's cover is a video stream to the container.
    if not isinstance(stream, VideoStream) or stream.disposition & Disposition.attached_pic:
        raise RedlineError(f"{path.name!r} has no moving picture.")
    if stream.codec_context is None:
        raise RedlineError(f"the codec of the film in {path.name!r} cannot be read here.")
    return stream


def _first_frame(container: InputContainer, stream: VideoStream, path: Path) -> VideoFrame:
    for tries, packet in enumerate(_packets(container, stream, path.name)):
        try:
            frames = packet.decode()
        except (av.FFmpegError, OSError):
            frames = []
        for frame in frames:
            if isinstance(frame, VideoFrame) and not frame.is_corrupt:
                return frame
        if tries > _DAMAGED_START:
            break
    raise RedlineError(f"no picture in {path.name!r} can be decoded ({stream.codec_context.name}).")


def _rate(stream: VideoStream) -> Fraction:
    for said in (stream.average_rate, stream.guessed_rate):
        if said and 0 < said <= _FASTEST:
            return Fraction(said)
    return Fraction(25)


def _pixels(frame: VideoFrame, to_rgb: VideoReformatter) -> Tensor:
    colours = None
    if int(frame.colorspace) == _UNSPECIFIED and not frame.format.is_rgb:
        # Players guess by the size where the film says nothing.
        large = frame.width >= 1280 or frame.height >= 720
        colours = Colorspace.ITU709 if large else Colorspace.ITU601
    rgb = to_rgb.reformat(frame, format="rgb24", src_colorspace=colours, interpolation=_SMOOTH_COLOUR)
    pixels = rgb.to_ndarray()
    if frame.rotation % 90 == 0 and frame.rotation % 360:
        pixels = np.rot90(pixels, frame.rotation // 90)
    return torch.from_numpy(np.ascontiguousarray(pixels))


def _upright(rotation: int, height: int, width: int) -> tuple[int, int]:
    return (width, height) if rotation % 180 == 90 else (height, width)


def _seconds(time: Fraction) -> str:
    return f"{float(time):.1f} s"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
