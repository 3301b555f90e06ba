"""A video file as a source. Gives every frame once, with its exact timestamp, even if the frame rate is variable."""

import threading
from collections import deque
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
from redline.stream.continuous_timestamps import ContinuousTimestamps
from redline.stream.frames import Clock, Frame
from redline.stream.sources.gaps import Gap, GapDetector
from redline.video.reading import (
    arbitrary_start_s,
    conversion_threads,
    enable_frame_threads,
    first_frame,
    frame_rate,
    main_stream,
    opened,
    packets,
    reason,
    side_data,
)
from redline.video.truncated import missing_bytes

# Causes of dropped frames: a frame cannot be decoded, or it is missing in the file.
DAMAGED, MISSING = "damaged", "missing"
_UNSPECIFIED = 2
_HDR = {16: "PQ", 18: "HLG"}
# By default, swscale repeats chroma samples instead of interpolating them, which would show the model jagged edges.
_SMOOTH_COLOUR = Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND


class DamageSuspected(Exception):
    """Raised if the video may be damaged, or does not support frame threads."""


def decode_frame_threaded(packets: Iterator[Packet], stream: VideoStream, gaps: GapDetector) -> Iterator[VideoFrame]:
    """Decodes several frames at a time, as long as no damage is found.

    In most videos a frame is one slice, so only frame threads use several cores. Their handling of damage depends on
    the timing of the threads, and near the end they may lose frames. Therefore this raises DamageSuspected at the first
    sign of damage, before anything is reported or skipped, and the caller continues with a sequential decoder.

    The signs are a decoding error, a frame or packet marked as corrupt, a gap, and frames that are missing at the end.
    FFmpeg marks some damage only later, or never (often for HEVC): such frames are returned with wrong pixels. The
    sequential decoder also does this, but possibly with other wrong pixels.
    """
    threads = enable_frame_threads(stream)
    if threads < 2:
        raise DamageSuspected
    with_content, shown, are_timed, newest = 0, 0, True, deque[int | None](maxlen=threads)
    while (packet := _next(packets)) is not None:
        if packet.is_corrupt or gaps.is_gap_possible:
            raise DamageSuspected
        if packet.size and not packet.is_discard:  # trimmed videos have packets whose frames must not be shown
            with_content, are_timed = with_content + 1, are_timed and packet.pts is not None
            newest.append(packet.pts)
        try:
            decoded = stream.decode(packet)
        except (av.FFmpegError, OSError) as error:
            raise DamageSuspected from error
        for frame in decoded:
            if frame.is_corrupt:
                raise DamageSuspected
            shown += 1
            if frame.pts in newest:
                newest.remove(frame.pts)
            yield frame
    # If there is an error near the end, FFmpeg does not report it and loses the frames after it, so packets without a
    # frame are a sign of damage there. Earlier in the file they are not.
    if newest if are_timed else shown < with_content:
        raise DamageSuspected


def _next(packets: Iterator[Packet]) -> Packet | None:
    try:
        return next(packets, None)
    except RedlineError as error:
        # The sequential decoder will raise this error again, after it has returned the frames before it.
        raise DamageSuspected from error


class DamagedVideo(RedlineError):
    """The video is damaged; with `drop`, `VideoFile` would skip the damage."""


@dataclass
class _Progress:
    """The number of yielded frames, and the timestamp of the last one."""

    count: int = 0
    last: int | None = None


class VideoFile:
    """A video file. Damage raises DamagedVideo; with `drop`, it is skipped, and `drop` is called for each lost frame.

    `origin_s` is the timestamp in seconds at which a broadcast container starts; it is 0 for other formats. Frames are
    scaled to `size` (height, width) during the conversion to RGB where swscale supports it; `Resized` handles the rest.
    `frame_threads` decodes several frames at a time; if the file is damaged, it is read again from its start, which
    would delay a live stream.
    """

    is_live = False

    def __init__(
        self,
        path: Path,
        clock: Clock | None = None,
        drop: Callable[[str], None] | None = None,
        size: tuple[int, int] | None = None,
        frame_threads: bool = True,
    ) -> None:
        self.path, self.name, self._size = path, path.name, size
        self._clock, self._drop, self._frame_threads = clock or Clock(), drop, frame_threads
        self._closed = threading.Event()
        with opened(path) as container:
            stream = main_stream(container, path)
            first = first_frame(container, stream, path)
            to_pixels(first, VideoReformatter())  # raises now if frames cannot be converted
            self.height, self.width = size or upright(first.rotation, first.height, first.width)
            self.rate, self.pixel_aspect = frame_rate(stream, path), pixel_aspect(stream, first.rotation)
            # Some formats start at an arbitrary time: counted from 0, the output would begin with a gap.
            self.origin_s = arbitrary_start_s(container)
            self.has_audio = bool(container.streams.audio)
        missing = missing_bytes(path)
        truncated = f"{self.name!r} is truncated: {missing:,} bytes are missing at its end."
        if missing and drop is None:
            raise DamagedVideo(truncated)
        self._is_truncated = missing > 0
        self.notes = (*((truncated,) if missing else ()), *hdr_notes(first, repr(self.name)))

    def frames(self) -> Generator[Frame, None, None]:
        done = _Progress()
        if self._frame_threads and not self._is_truncated:
            with suppress(DamageSuspected):
                yield from self._frames(done, is_threaded=True)
                return
        yield from self._frames(done, is_threaded=False)

    def close(self) -> None:
        self._closed.set()

    def _frames(self, done: _Progress, is_threaded: bool) -> Generator[Frame, None, None]:
        """Yields the frames after those that `done` counts. Only the sequential decoder reports and skips damage,
        because the damage that frame threads find depends on their timing."""
        last: int | None = None
        damage, to_rgb = list[str](), VideoReformatter()
        with opened(self.path) as container:
            stream = main_stream(container, self.path)
            time_base = Fraction(stream.time_base or Fraction(1, av.time_base))
            default_duration = max(1, round(1 / self.rate / time_base))
            captured_s, gaps = self._clock.now_s(), GapDetector(container, stream, self.rate)
            video = self._packets(container, stream, gaps)
            decoded = decode_frame_threaded(video, stream, gaps) if is_threaded else self._decode(video, stream)
            for frame in decoded:
                if self._closed.is_set():
                    return
                if frame.is_corrupt and last is not None:
                    damage.append(f"a frame of {self.name!r} is damaged at {_format_time(last * time_base)}.")
                if not (frame.is_corrupt and self._is_truncated):
                    # The partial frame at the end of a truncated file is not reported: `notes` covers it.
                    for message in damage:
                        self._skip(message)
                    damage.clear()
                if frame.is_corrupt:
                    continue
                pts = frame.pts
                if pts is not None and last is not None:
                    self._skip_gap(gaps.between(last * time_base, pts * time_base))
                if pts is None or (last is not None and pts <= last):
                    # Badly cut videos repeat timestamps; using the next free one keeps the order and the number of
                    # frames.
                    pts = 0 if last is None else last + (default_duration if pts is None else 1)
                last = pts
                if done.last is not None and pts <= done.last:
                    continue
                pixels, duration = to_pixels(frame, to_rgb, self._size), frame.duration or 0
                index, done.count, done.last = done.count, done.count + 1, pts
                yield Frame(pixels, index, pts, time_base, captured_s, duration, pixel_aspect=self.pixel_aspect)
                captured_s = self._clock.now_s()
            if last is not None:
                last_s = last * time_base
                gap = gaps.after_truncation(last_s) if self._is_truncated else gaps.at_end(last_s)
                if gap is not None and is_threaded:
                    raise DamageSuspected
                self._skip_gap(gap, last_s)

    def _packets(self, container: InputContainer, stream: VideoStream, gaps: GapDetector) -> Iterator[Packet]:
        """Yields the packets of the video stream with continuous timestamps."""
        timestamps = ContinuousTimestamps(container.format.name)
        for packet in packets(container, None, self.name):
            timestamps.shift(packet)
            gaps.read(packet)
            if packet.stream.index == stream.index:
                yield packet

    def _decode(self, packets: Iterator[Packet], stream: VideoStream) -> Iterator[VideoFrame]:
        has_frame = False
        for packet in packets:
            try:
                decoded = stream.decode(packet)
            except (av.FFmpegError, OSError) as error:
                # The partial frame at the end of a truncated file is not reported: `notes` covers it.
                is_end = self._is_truncated and (packet.is_corrupt or not packet.size)
                if has_frame and not is_end:
                    self._skip(f"a frame of {self.name!r} cannot be decoded: {reason(error)}.")
                # If a recording starts between two key frames, its first packets cannot be decoded: this is no damage.
                continue
            for frame in decoded:
                has_frame = has_frame or not frame.is_corrupt
                yield frame

    def _skip(self, message: str, cause: str = DAMAGED, frames: int = 1) -> None:
        if self._drop is None:
            raise DamagedVideo(message)
        for _ in range(frames):
            self._drop(cause)

    def _skip_gap(self, gap: Gap | None, end_s: Fraction | None = None) -> None:
        if gap is None:
            return
        time = _format_time(gap.at_s)
        what = f": it cannot be read after {time}" if gap.at_s == end_s else f" at {time}: frames are missing"
        self._skip(f"{self.name!r} is damaged{what}.", MISSING, gap.frames)


def to_pixels(frame: VideoFrame, to_rgb: VideoReformatter, size: tuple[int, int] | None = None) -> Tensor:
    """Returns upright RGB pixels, scaled to `size` (height, width) in the same pass if swscale supports it."""
    colours = None
    if int(frame.colorspace) == _UNSPECIFIED and not frame.format.is_rgb:
        # Players choose BT.709 or BT.601 by the frame size if the file declares no colour space.
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
            raise RedlineError(f"frames in {frame.format.name} cannot be converted to RGB: {reason(error)}.") from error
        # Swscale fails for extreme ratios such as 4,000 pixels to 17; `Resized` scales such frames.
        return to_pixels(frame, to_rgb)
    return torch.from_numpy(np.ascontiguousarray(_turned(rgb.to_ndarray(), frame)))


def _turned(pixels: np.ndarray, frame: VideoFrame) -> np.ndarray:
    """Returns the pixels upright. The display matrix is used because a rotation angle cannot express mirroring."""
    if frame.rotation % 90:
        return pixels
    matrix: Any = side_data(frame).get(Type.DISPLAYMATRIX)
    if matrix is None:
        return np.rot90(pixels, frame.rotation // 90)
    # A pixel at (x, y) is shown at (across_x · x + across_y · y, down_x · x + down_y · y).
    across_x, down_x, _, across_y, down_y, *_ = np.frombuffer(matrix, np.int32).tolist()
    if frame.rotation % 180 == 90:
        pixels, across_x, down_y = pixels.transpose(1, 0, 2), across_y, down_x
    return pixels[:: -1 if down_y < 0 else 1, :: -1 if across_x < 0 else 1]


def hdr_notes(frame: VideoFrame, name: str) -> tuple[str, ...]:
    """Returns a note if the video is HDR, which is not tone-mapped."""
    curve = _HDR.get(int(frame.color_trc))
    if curve is None:
        return ()
    return (f"{name} is HDR ({curve}) and is not tone-mapped: its colours look pale.",)


def upright(rotation: int, height: int, width: int) -> tuple[int, int]:
    return (width, height) if rotation % 180 == 90 else (height, width)


def pixel_aspect(stream: VideoStream, rotation: int) -> Fraction:
    """Returns the pixel aspect ratio of the upright image; 1 if the file does not declare it."""
    declared = Fraction(stream.sample_aspect_ratio or 1)
    return 1 / declared if rotation % 180 == 90 else declared


def _format_time(time: Fraction) -> str:
    return f"{float(time):.1f} s"
