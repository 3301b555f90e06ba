"""Reads the frames of a video, from its start or from the point where an earlier run stopped.

That point is identified by the time stamp and the digest of its frame, because after a seek, some decoders need several
frames until their output is correct, and some containers seek too far. If the frame is not found, the search is
repeated from earlier points, and finally from the start of the video.
"""

import hashlib
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from torch import Tensor

from redline.errors import RedlineError
from redline.upscale.video.pixels import to_rgb
from redline.upscale.video.probe import VideoInfo, seconds_text
from redline.video.reading import main_stream, opened, packets
from redline.video.truncated import missing_bytes

_MISSING_S, _UNREAD_SHARE = 0.25, 0.05
_SEEK_BACK_S = (0, 2, 20)
# A larger step back in time is not caused by reordering: another, concatenated video starts there.
_BACK_S = 0.5


class Decoded(NamedTuple):
    frame: VideoFrame
    pts: int
    duration: int


@dataclass(frozen=True)
class Mark:
    """The last frame of a finished part: its index in the video, its time stamp and its digest."""

    index: int
    pts: int
    digest: str


@dataclass
class Damage:
    """Collects damage. With `keep_going`, each kind of damage becomes a note; otherwise the first damage raises."""

    name: str
    keep_going: bool
    notes: dict[str, str] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def met(self, kind: str, place: str) -> None:
        """Raises for damage, or adds a note. `kind` is a clause such as 'a frame is damaged'."""
        if not self.keep_going:
            raise RedlineError(f"{self.name!r}: {kind} {place}; give --keep-going to keep what can be read.")
        self._times[kind] = self._times.get(kind, 0) + 1
        first = self.notes.get(kind, "").split(" (")[0] or f"{kind} {place}"
        more = self._times[kind] - 1
        self.notes[kind] = first if not more else f"{first} (and {more} more)"

    def remark(self, kind: str) -> None:
        self.notes.setdefault(kind, kind)


def read_frames(video: VideoInfo, damage: Damage, after: Mark | None = None) -> Generator[Decoded, None, None]:
    """Yields frames (only those after the mark `after`, if given) in display order, with increasing time stamps."""
    missing = missing_bytes(video.path)
    if missing:
        damage.met(f"the file is truncated, {missing:,} bytes are missing", "at its end")
    if after is None:
        yield from _decode(video, damage)
        return
    for back_s in _SEEK_BACK_S:
        with closing(_decode(video, damage, after, max(0, after.pts - round(back_s / video.time_base)))) as frames:
            if _is_found(video, frames, after):
                yield from frames
                return
    with closing(_decode(video, damage, after)) as frames:
        place = next((decoded for index, decoded in enumerate(frames) if index == after.index), None)
        if place is None or digest(to_rgb(place.frame, video.colour)) != after.digest:
            raise RedlineError(f"cannot find where {video.path.name!r} stopped: start without --resume.")
        yield from frames


def digest(pixels: Tensor) -> str:
    return hashlib.blake2b(pixels.contiguous().numpy().data, digest_size=16).hexdigest()


def _is_found(video: VideoInfo, frames: Iterator[Decoded], mark: Mark) -> bool:
    place = next((decoded for decoded in frames if decoded.pts >= mark.pts), None)
    if place is None or place.pts != mark.pts:
        return False
    return digest(to_rgb(place.frame, video.colour)) == mark.digest


def _decode(
    video: VideoInfo, damage: Damage, mark: Mark | None = None, seek_pts: int | None = None
) -> Generator[Decoded, None, None]:
    """Yields the frames of the video from its start or, if `seek_pts` is given, from a key frame near that time.

    If `mark` is given, damage up to the frame of `mark` is not reported, because an earlier run has reported it.
    """
    last: int | None = None
    whole = False
    with opened(video.path) as container:
        stream = main_stream(container, video.path)
        if seek_pts is not None:
            container.seek(seek_pts, stream=stream)
        for found in _frames_and_faults(container, stream):
            known = mark is not None and (last is None or last < mark.pts)
            place = f"at {seconds_text(float((last or 0) * video.time_base))}"
            if isinstance(found, str):
                if whole and not known:
                    damage.met(found, place)
                continue
            if found.is_corrupt and not whole:
                if seek_pts is None:
                    damage.remark("the first frames cannot be decoded and are left out")
                continue
            whole = True
            if (found.width, found.height) != (video.width, video.height):
                raise RedlineError(
                    f"the frames of {video.path.name!r} change from {video.width}×{video.height} to "
                    f"{found.width}×{found.height} {place}: split the video there and upscale each piece."
                )
            if found.is_corrupt and not known:
                damage.met("a frame is damaged", place)
            pts = found.pts
            if pts is not None and last is not None and (last - pts) * video.time_base > _BACK_S and not known:
                damage.met(f"time jumps back by {float((last - pts) * video.time_base):.1f} s", place)
            if pts is None or (last is not None and pts <= last):
                damage.remark("time stamps that are missing or do not rise are replaced by the next free ones")
                pts = 0 if last is None else last + (1 if pts is not None else video.frame_ticks)
            lasts = found.duration or (video.frame_ticks if last is None else pts - last)
            last = pts
            yield Decoded(found, pts, lasts)


def _frames_and_faults(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame | str]:
    """Yields frames, and a description of the fault wherever a frame cannot be read."""
    found = packets(container, None, "")
    end, read_bytes = Fraction(0), 0
    while True:
        try:
            packet = next(found, None)
        except RedlineError:
            yield "the rest of the file cannot be read"
            with suppress(av.FFmpegError, OSError):
                yield from stream.decode(None)
            return
        if packet is None:
            break
        end = max(end, _end(packet))
        read_bytes = max(read_bytes, (packet.pos or 0) + packet.size)
        if packet.stream.index != stream.index:
            continue
        try:
            yield from stream.decode(packet)
        except (av.FFmpegError, OSError):
            yield "a frame cannot be decoded"
    if _is_lost(container, end, read_bytes):
        yield "the rest cannot be found"


def _is_lost(container: InputContainer, end: Fraction, read_bytes: int) -> bool:
    """Returns whether the reader of a damaged Matroska file ended early without an error.

    The reader ended early if both a part of the duration and a part of the bytes were not read. A missing part of the
    duration alone is not enough, because it may be the duration of the last frame.
    """
    if container.format.name != "matroska,webm" or not container.duration:
        return False
    missing = Fraction(container.duration + (container.start_time or 0), av.time_base) - end
    return missing > _MISSING_S and container.size - read_bytes > _UNREAD_SHARE * container.size


def _end(packet: Packet) -> Fraction:
    start = packet.pts if packet.pts is not None else packet.dts
    return Fraction(0) if start is None else (start + (packet.duration or 0)) * Fraction(packet.time_base)
