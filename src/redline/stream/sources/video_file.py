"""A film from a file, every picture once and at its exact time, whether these come steadily or not."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.clock import Clock, SystemClock
from redline.stream.continuous_timestamps import ARBITRARY_START_FORMATS, ContinuousTimestamps
from redline.stream.frames import Frame
from redline.stream.sources.frame_threaded import DamageSuspected, decode_frame_threaded
from redline.stream.sources.gaps import Gap, GapDetector
from redline.video.reading import conversion_threads, first_frame, frame_rate, main_stream, opened, packets, reason
from redline.video.truncated import missing_bytes

# Why pictures of a film are left out: it holds what cannot be shown, or a hole.
DAMAGED, MISSING = "damaged", "missing"
_TICK_90KHZ = Fraction(1, 90_000)
_UNSPECIFIED = 2
_HDR = {16: "PQ", 18: "HLG"}
# Swscale's default repeats colour samples instead of interpolating them, and a model would see the steps.
_SMOOTH_COLOUR = Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND


class DamagedVideo(RedlineError):
    """What cannot be shown might be left out."""


@dataclass
class _Given:
    """How many frames were given, and the time of the last."""

    count: int = 0
    last: int | None = None


class VideoFile:
    """`origin_s` is the time at which the film begins on its own clock, and `pixel_aspect` how much wider than high its
    pixels are shown. Damage is an error, unless there is a `drop`: that is told of each picture that is left out.
    Frames are brought to `size` (height, width) on their way to RGB where that can be done; `Resized` does the rest.
    `ahead` decodes several pictures at a time, and begins again at the film's start where it is damaged: nobody should
    be looking then."""

    is_live = False

    def __init__(
        self,
        path: Path,
        clock: Clock | None = None,
        drop: Callable[[str], None] | None = None,
        size: tuple[int, int] | None = None,
        ahead: bool = True,
    ) -> None:
        self.path, self.name, self._size = path, path.name, size
        self._clock, self._drop, self._ahead = clock or SystemClock(), drop, ahead
        self._closed = threading.Event()
        with opened(path) as container:
            stream = main_stream(container, path)
            first = first_frame(container, stream, path)
            to_pixels(first, VideoReformatter())  # what cannot be shown is known before the start
            self.height, self.width = size or upright(first.rotation, first.height, first.width)
            self.rate, self.pixel_aspect = frame_rate(stream, path), pixel_aspect(stream, first.rotation)
            # A film that starts at some arbitrary time would start with nothing.
            start = container.start_time if container.format.name in ARBITRARY_START_FORMATS else None
            self.origin_s = round(Fraction(start or 0, av.time_base) / _TICK_90KHZ) * _TICK_90KHZ
            self.has_audio = bool(container.streams.audio)
        missing = missing_bytes(path)
        cut = f"{self.name!r} is cut off: {missing:,} bytes are missing at its end."
        if missing and drop is None:
            raise DamagedVideo(cut)
        self._is_cut_off = missing > 0
        self.notes = (*((cut,) if missing else ()), *hdr_notes(first, repr(self.name)))

    def frames(self) -> Generator[Frame, None, None]:
        given = _Given()
        if self._ahead and not self._is_cut_off:
            with suppress(DamageSuspected):
                yield from self._frames(given, is_ahead=True)
                return
        yield from self._frames(given, is_ahead=False)

    def close(self) -> None:
        self._closed.set()

    def _frames(self, given: _Given, is_ahead: bool) -> Generator[Frame, None, None]:
        """Those behind what was given. Whatever is wrong is told and left out by the careful way alone, which meets all
        of it: what fell to a decoder's threads would hang on them."""
        last: int | None = None
        damaged, to_rgb = list[str](), VideoReformatter()
        with opened(self.path) as container:
            stream = main_stream(container, self.path)
            time_base = Fraction(stream.time_base or Fraction(1, av.time_base))
            usual = max(1, round(1 / self.rate / time_base))
            captured_s, holes = self._clock.now_s(), GapDetector(container, stream, self.rate)
            read = self._packets(container, stream, holes)
            for found in decode_frame_threaded(read, stream, holes) if is_ahead else self._decoded(read):
                if self._closed.is_set():
                    return
                if found.is_corrupt and last is not None:
                    damaged.append(f"a picture of {self.name!r} is damaged at {_seconds(last * time_base)}.")
                if not (found.is_corrupt and self._is_cut_off):
                    # At the end of a film that is cut off half a picture is no damage: a note has told of it.
                    for sentence in damaged:
                        self._leave_out(sentence)
                    damaged.clear()
                if found.is_corrupt:
                    continue
                pts = found.pts
                if pts is not None and last is not None:
                    self._tell_missing(holes.between(last * time_base, pts * time_base))
                if pts is None or (last is not None and pts <= last):
                    # Films that were cut badly repeat times: the next free place keeps order and number.
                    pts = 0 if last is None else last + (usual if pts is None else 1)
                last = pts
                if given.last is not None and pts <= given.last:
                    continue
                pixels, lasts = to_pixels(found, to_rgb, self._size), found.duration or 0
                index, given.count, given.last = given.count, given.count + 1, pts
                yield Frame(pixels, index, pts, time_base, captured_s, lasts, pixel_aspect=self.pixel_aspect)
                captured_s = self._clock.now_s()
            if last is not None:
                last_s = last * time_base
                missing = holes.behind_cut(last_s) if self._is_cut_off else holes.at_end(last_s)
                if missing is not None and is_ahead:
                    raise DamageSuspected
                self._tell_missing(missing, last_s)

    def _packets(self, container: InputContainer, stream: VideoStream, holes: GapDetector) -> Iterator[Packet]:
        """Those of pictures, where they belong."""
        joined = ContinuousTimestamps(container.format.name)
        for packet in packets(container, None, self.name):
            joined.move(packet)
            holes.read(packet)
            if packet.stream.index == stream.index:
                yield packet

    def _decoded(self, read: Iterator[Packet]) -> Iterator[VideoFrame]:
        met = False
        for packet in read:
            try:
                decoded = packet.decode()
            except (av.FFmpegError, OSError) as error:
                # Half of a picture at the end, of which a note has told.
                is_the_cut = self._is_cut_off and (packet.is_corrupt or not packet.size)
                if met and not is_the_cut:
                    self._leave_out(f"a picture of {self.name!r} cannot be decoded: {reason(error)}.")
                # A recording may start between two key frames.
                continue
            for frame in decoded:
                if isinstance(frame, VideoFrame):
                    met = met or not frame.is_corrupt
                    yield frame

    def _leave_out(self, sentence: str, cause: str = DAMAGED, pictures: int = 1) -> None:
        if self._drop is None:
            raise DamagedVideo(sentence)
        for _ in range(pictures):
            self._drop(cause)

    def _tell_missing(self, missing: Gap | None, end_s: Fraction | None = None) -> None:
        if missing is None:
            return
        if missing.at_s == end_s:
            sentence = f"{self.name!r} is damaged: it cannot be read behind {_seconds(missing.at_s)}."
        else:
            sentence = f"{self.name!r} is damaged at {_seconds(missing.at_s)}: pictures are missing."
        self._leave_out(sentence, MISSING, missing.pictures)


def to_pixels(frame: VideoFrame, to_rgb: VideoReformatter, size: tuple[int, int] | None = None) -> Tensor:
    """Upright, in RGB, of that size (height, width) where swscale can: in one pass over the picture, not two."""
    colours = None
    if int(frame.colorspace) == _UNSPECIFIED and not frame.format.is_rgb:
        # Players guess by the size where the film says nothing.
        large = frame.width >= 1280 or frame.height >= 720
        colours = Colorspace.ITU709 if large else Colorspace.ITU601
    height, width = (frame.height, frame.width) if size is None else upright(frame.rotation, *size)
    same = (height, width) == (frame.height, frame.width)
    try:
        rgb = to_rgb.reformat(
            frame,
            width,
            height,
            format="rgb24",
            src_colorspace=colours,
            interpolation=_SMOOTH_COLOUR | (Interpolation.BILINEAR if same else Interpolation.BICUBIC),
            threads=conversion_threads(max(frame.height * frame.width, height * width)),
        )
    except av.FFmpegError as error:
        if same:
            raise RedlineError(f"pictures in {frame.format.name} cannot be shown: {reason(error)}.") from error
        # Swscale brings 4,000 pixels to 17 no more.
        return to_pixels(frame, to_rgb)
    return torch.from_numpy(np.ascontiguousarray(_turned(rgb.to_ndarray(), frame)))


def _turned(pixels: np.ndarray, frame: VideoFrame) -> np.ndarray:
    """As it is to be shown. A rotation cannot say that a picture is mirrored: its matrix can."""
    if frame.rotation % 90:
        return pixels
    try:
        kept: Any = frame.side_data
        matrix = kept.get(Type.DISPLAYMATRIX)
    except ValueError:
        # PyAV lists all kinds of such data or none, and fails on those that are newer than itself.
        matrix = None
    if matrix is None:
        return np.rot90(pixels, frame.rotation // 90)
    # A pixel at (x, y) is shown at (across_x · x + across_y · y, down_x · x + down_y · y).
    across_x, down_x, _, across_y, down_y, *_ = np.frombuffer(matrix, np.int32).tolist()
    if frame.rotation % 180 == 90:
        pixels, across_x, down_y = pixels.transpose(1, 0, 2), across_y, down_x
    return pixels[:: -1 if down_y < 0 else 1, :: -1 if across_x < 0 else 1]


def hdr_notes(frame: VideoFrame, name: str) -> tuple[str, ...]:
    """A sentence where the picture has more light than is shown."""
    curve = _HDR.get(int(frame.color_trc))
    if curve is None:
        return ()
    return (f"{name} is HDR ({curve}), and its light is not mapped to what is shown here: colours come out pale.",)


def upright(rotation: int, height: int, width: int) -> tuple[int, int]:
    return (width, height) if rotation % 180 == 90 else (height, width)


def pixel_aspect(stream: VideoStream, rotation: int) -> Fraction:
    """Of the upright picture; 1 where the film does not say."""
    said = Fraction(stream.sample_aspect_ratio or 1)
    return 1 / said if rotation % 180 == 90 else said


def _seconds(time: Fraction) -> str:
    return f"{float(time):.1f} s"
