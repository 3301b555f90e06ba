"""What a film is: its stream of pictures, their size, clock, colours and orientation, and what to say about it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import SideData, Type
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.video.colour import Colour, colour_of

# Frames of such side data carry what no encoder here is told.
_LOST = {
    Type.MASTERING_DISPLAY_METADATA: "HDR mastering data",
    Type.CONTENT_LIGHT_LEVEL: "HDR light levels",
    Type.DYNAMIC_HDR_PLUS: "HDR10+ data",
    Type.DOVI_METADATA: "Dolby Vision data",
    Type.A53_CC: "closed captions inside the pictures",
}
_DAMAGED_START = 1000
_FASTEST, _PACKETS_TIMED = 240, 100


@dataclass(frozen=True)
class Film:
    """A film as its first picture and its headers show it; `matrix` turns it upright, as nine numbers of ISO 14496."""

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
        """How long a picture lasts in units of the time base, where nothing more exact is known."""
        return max(1, round(1 / (self.rate * self.time_base)))


@contextmanager
def opened(path: Path) -> Iterator[InputContainer]:
    """The file, open for reading; anything that is no film is one sentence."""
    try:
        # "file:" keeps a name with a colon from being read as a protocol; tags need not be valid UTF-8 to be kept.
        container = av.open(f"file:{path}", metadata_errors="surrogateescape")
    except (av.FFmpegError, OSError) as error:
        raise RedlineError(_why_not(path, error)) from error
    with container:
        yield container


def main_stream(container: InputContainer, path: Path) -> VideoStream:
    """The stream of moving pictures that a player would show."""
    cover = Disposition.attached_pic | Disposition.timed_thumbnails
    moving = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not moving:
        still = " but a cover picture" if container.streams.video else ""
        raise RedlineError(f"{path.name!r} has no video stream{still}.")
    best = container.streams.best("video")
    stream = next((stream for stream in moving if best is not None and stream.index == best.index), moving[0])
    if stream.codec_context is None:
        raise RedlineError(f"the pictures in {path.name!r} are in a form for which there is no decoder.")
    stream.thread_type = "AUTO"
    return stream


def probe(path: Path) -> Film:
    """Reads the headers and the first whole picture."""
    with opened(path) as container:
        stream = main_stream(container, path)
        frame = _first_frame(container, stream, path)
        time_base = stream.time_base
        if not time_base or frame.width < 1 or frame.height < 1:
            raise RedlineError(f"{path.name!r} does not say how large its pictures are or when they are shown.")
        colour, notes = colour_of(frame)
        rate = _rate(stream, path)
        aspect = stream.sample_aspect_ratio
        return Film(
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


def _first_frame(container: InputContainer, stream: VideoStream, path: Path) -> VideoFrame:
    """A recording may start between two key frames, so that its first packets cannot be decoded."""
    for tries, packet in enumerate(container.demux(stream)):
        try:
            frames = packet.decode()
        except (av.FFmpegError, OSError):
            frames = []
        for frame in frames:
            if isinstance(frame, VideoFrame) and not frame.is_corrupt:
                return frame
        if tries > _DAMAGED_START:
            break
    raise RedlineError(f"no picture in {path.name!r} can be decoded.")


def _rate(stream: VideoStream, path: Path) -> Fraction:
    """Pictures a second. A file that does not say so is given its clock's rate, which tells nothing."""
    for said in (stream.average_rate, stream.guessed_rate):
        if said and 0 < said <= _FASTEST:
            return Fraction(said)
    with opened(path) as container:
        packets = islice(container.demux(main_stream(container, path)), _PACKETS_TIMED)
        times = [packet.pts for packet in packets if packet.pts is not None]
    if len(times) < 2 or not stream.time_base or max(times) == min(times):
        return Fraction(25)
    measured = (len(times) - 1) / ((max(times) - min(times)) * Fraction(stream.time_base))
    return min(measured, Fraction(_FASTEST)).limit_denominator(1001)


def _count(container: InputContainer, stream: VideoStream, rate: Fraction) -> int | None:
    if stream.frames:
        return stream.frames
    if stream.duration and stream.time_base:
        return max(1, round(stream.duration * stream.time_base * rate))
    return max(1, round(container.duration * rate / av.time_base)) if container.duration else None


def _display_matrix(frame: VideoFrame) -> tuple[int, ...] | None:
    data = _side_data(frame).get(Type.DISPLAYMATRIX)
    if data is not None:
        return tuple(int(value) for value in np.frombuffer(bytes(cast(Any, data)), np.int32))
    if not frame.rotation:
        return None
    turn = math.radians(frame.rotation)
    sine, cosine = (round(value * (1 << 16)) for value in (math.sin(turn), math.cos(turn)))
    return (cosine, -sine, 0, sine, cosine, 0, 0, 0, 1 << 30)


def _side_data(frame: VideoFrame) -> dict[Type, SideData]:
    try:
        # Unlike other mappings, it iterates over its values.
        return {data.type: data for data in cast(Any, frame.side_data)}
    except ValueError:
        # PyAV lists all kinds or none, and fails on those that are newer than itself.
        return {}


def _remarks(frame: VideoFrame) -> list[str]:
    notes = []
    if frame.interlaced_frame:
        notes.append(
            "the film is interlaced: its fields are enlarged as if they were one picture; deinterlace it first"
        )
    if any(component.is_alpha for component in frame.format.components):
        notes.append("the film's transparency is not kept")
    return notes + [f"{_LOST[kind]} is not kept" for kind in _side_data(frame) if kind in _LOST]


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{str(path)!r} does not exist."
    if isinstance(error, PermissionError | IsADirectoryError):
        return f"cannot read {str(path)!r}: {error.strerror}."
    if path.is_file() and path.stat().st_size == 0:
        return f"{path.name!r} is empty."
    return f"{path.name!r} is no film that can be read, or its end, with the index, is missing."


def seconds_text(seconds: float) -> str:
    """A place in a film, 1:02:03.4."""
    hours, rest = divmod(max(0.0, seconds), 3600)
    minutes, rest = divmod(rest, 60)
    whole = f"{int(minutes)}:{math.floor(rest * 10) / 10:04.1f}"
    return f"{int(hours)}:{whole.zfill(7)}" if hours else whole
