"""Reads what a video is: its video stream, frame size, time base, colours and orientation."""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.video.pixels import Colour, colour_of
from redline.video.reading import first_frame, frame_rate, main_stream, opened, side_data

# Side data of frames that is not passed to the encoder.
_LOST = {
    Type.MASTERING_DISPLAY_METADATA: "HDR mastering data",
    Type.CONTENT_LIGHT_LEVEL: "HDR light levels",
    Type.DYNAMIC_HDR_PLUS: "HDR10+ data",
    Type.DOVI_METADATA: "Dolby Vision data",
    Type.A53_CC: "closed captions inside the frames",
}


@dataclass(frozen=True)
class VideoInfo:
    """A video as described by its headers and first frame. `matrix` is the display matrix of ISO 14496."""

    path: Path
    container: str
    stream_index: int
    width: int
    height: int
    time_base: Fraction
    rate: Fraction
    frames: int | None
    pixel_format: str
    colour: Colour
    pixel_aspect: Fraction | None
    matrix: tuple[int, ...] | None
    notes: tuple[str, ...]

    @property
    def frame_ticks(self) -> int:
        """The default duration of a frame in units of the time base."""
        return max(1, round(1 / (self.rate * self.time_base)))


def probe(path: Path) -> VideoInfo:
    """Reads the headers and the first complete frame."""
    with opened(path) as container:
        stream = main_stream(container, path)
        frame = first_frame(container, stream, path)
        time_base = stream.time_base
        if not time_base or frame.width < 1 or frame.height < 1:
            raise RedlineError(f"cannot read {path.name!r}: the frame size or the time base is missing.")
        (colour, notes), rate, aspect = colour_of(frame), frame_rate(stream, path), stream.sample_aspect_ratio
        return VideoInfo(
            path=path,
            container=container.format.name,
            stream_index=stream.index,
            width=frame.width,
            height=frame.height,
            time_base=Fraction(time_base),
            rate=rate,
            frames=_count(container, stream, rate),
            pixel_format=frame.format.name,
            colour=colour,
            pixel_aspect=Fraction(aspect) if aspect and aspect != 1 else None,
            matrix=_display_matrix(frame),
            notes=(*notes, *_remarks(frame)),
        )


def _count(container: InputContainer, stream: VideoStream, rate: Fraction) -> int | None:
    if stream.frames:
        return stream.frames
    if stream.duration and stream.time_base:
        return max(1, round(stream.duration * stream.time_base * rate))
    return max(1, round(container.duration * rate / av.time_base)) if container.duration else None


def _display_matrix(frame: VideoFrame) -> tuple[int, ...] | None:
    data = side_data(frame).get(Type.DISPLAYMATRIX)
    if data is not None:
        return tuple(int(value) for value in np.frombuffer(bytes(cast(Any, data)), np.int32))
    if not frame.rotation:
        return None
    turn = math.radians(frame.rotation)
    sine, cosine = (round(value * (1 << 16)) for value in (math.sin(turn), math.cos(turn)))
    return (cosine, -sine, 0, sine, cosine, 0, 0, 0, 1 << 30)


def _remarks(frame: VideoFrame) -> list[str]:
    notes = []
    if frame.interlaced_frame:
        notes.append("the video is interlaced, which is not handled: deinterlace it first")
    if any(component.is_alpha for component in frame.format.components):
        notes.append("the video's transparency is not kept")
    return notes + [f"{_LOST[kind]} is not kept" for kind in side_data(frame) if kind in _LOST]


def seconds_text(seconds: float) -> str:
    """Formats a time in a video, such as 1:02:03.4."""
    hours, rest = divmod(max(0.0, seconds), 3600)
    minutes, rest = divmod(rest, 60)
    whole = f"{int(minutes)}:{math.floor(rest * 10) / 10:04.1f}"
    return f"{int(hours)}:{whole.zfill(7)}" if hours else whole
