"""Encodes upscaled frames into parts: video files that each start with a key frame."""

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.machine.pinned_copies import PendingCopy
from redline.upscale.video.encoders import Encoder
from redline.upscale.video.parts import Part, PartsFolder, digest_file
from redline.upscale.video.pixels import to_frame
from redline.upscale.video.probe import VideoInfo
from redline.video.reading import reason
from redline.video.writing import open_encoder, open_output

_MILLISECOND = Fraction(1, 1000)
# By how much decode times precede display times. No codec holds back more frames than this.
_EARLIER = 256
_MPEG4_LARGEST_CLOCK = 65535


@dataclass(frozen=True)
class PartEnd:
    """The data that is recorded with the last frame of a part."""

    digest: str
    is_end: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Frame:
    """A frame on its way through the stages. `end` is set for the last frame of a part.

    `pixels` is float32 (1, 3, H, W) before the upscaling. Afterwards it has the planes to encode, concatenated into one
    tensor, so that one copy moves them to the host.
    """

    pixels: PendingCopy
    pts: int
    duration: int
    end: PartEnd | None


class PartWriter:
    """Writes the parts. Only one thread may use it, but other threads may read `frames_done`."""

    def __init__(self, folder: PartsFolder, video: VideoInfo, encoder: Encoder, finished: list[Part]) -> None:
        self.parts = list(finished)
        self.frames_done = sum(len(part.pts) for part in finished)
        self._folder, self._video, self._encoder = folder, video, encoder
        self._clock = _clock(video, encoder)
        self._open: _OpenPart | None = None

    def write(self, frame: Frame) -> None:
        number = len(self.parts)
        path = self._folder.partial_path(number)
        try:
            if self._open is None:
                self._open = _OpenPart(path, self._encoder, self._video, self._clock)
            self._open.add(frame.pixels, frame.pts)
            self.frames_done += 1
            if frame.end is not None:
                part = self._open.close(self.frames_done, frame.duration, frame.end)
                self._open = None
                self._folder.keep(number, part)
                self.parts.append(part)
        except (OSError, av.FFmpegError) as error:
            raise RedlineError(why_not_written(path, error)) from error

    def abandon(self) -> None:
        """Closes an unfinished part; the next run removes its file."""
        if self._open is not None:
            self._open.abandon()
            self._open = None


class _OpenPart:
    def __init__(self, path: Path, encoder: Encoder, video: VideoInfo, clock: Fraction) -> None:
        self._path, self._encoder, self._clock = path, encoder, clock
        self._by_number = clock != video.time_base
        self._pts: list[int] = []
        self._numbers: dict[int, int] = {}
        self._packets = self._delay = 0
        self._container: OutputContainer = open_output(path, "matroska")
        self._stream = self._add_stream(video)

    def add(self, packed: PendingCopy, pts: int) -> None:
        encoder = self._encoder
        frame = to_frame(packed.wait(), encoder.layout, encoder.width, encoder.height, encoder.colour)
        packed.release()
        frame.pts = len(self._pts) if self._by_number else pts
        frame.time_base = self._clock
        self._numbers[frame.pts] = len(self._pts)
        self._pts.append(pts)
        self._mux(self._stream.encode(frame))

    def close(self, frames_done: int, last_duration: int, end: PartEnd) -> Part:
        self._mux(self._stream.encode(None))
        self._container.close()
        if self._packets != len(self._pts):
            raise RedlineError(f"{self._encoder.name} returned {self._packets} of {len(self._pts)} frames.")
        first, own = frames_done - len(self._pts), digest_file(self._path)
        return Part(first, tuple(self._pts), last_duration, self._delay, end.digest, end.is_end, own, end.notes)

    def abandon(self) -> None:
        with suppress(OSError, ValueError, av.FFmpegError):
            self._container.close()

    def _add_stream(self, video: VideoInfo) -> VideoStream:
        encoder = self._encoder
        stream = self._container.add_stream(encoder.name, rate=video.rate, options=dict(encoder.options))
        assert isinstance(stream, VideoStream)
        context = stream.codec_context
        context.width, context.height, context.pix_fmt = encoder.width, encoder.height, encoder.pixel_format
        context.time_base = self._clock
        # PyAV's default, threads over slices, would encode every frame in separate slices.
        context.thread_type = "AUTO"
        encoder.colour.tag(context)
        if video.pixel_aspect:
            context.sample_aspect_ratio = video.pixel_aspect
        open_encoder(stream, encoder.options)
        return stream

    def _mux(self, packets: list[Packet]) -> None:
        for packet in packets:
            number = self._numbers.pop(packet.pts or 0)
            self._delay = max(self._delay, self._packets - number)
            packet.pts, packet.dts, packet.duration = number, self._packets - _EARLIER, 1
            packet.time_base = _MILLISECOND
            self._packets += 1
            self._container.mux(packet)


def why_not_written(path: Path, error: Exception) -> str:
    return f"cannot write {str(path)!r}: {reason(error)}."


def _clock(video: VideoInfo, encoder: Encoder) -> Fraction:
    """Returns the time base for the encoder: that of the video, so that it knows the duration of each frame.

    MPEG-4 does not support fine time bases; its frames are numbered at a constant rate instead.
    """
    if encoder.name != "mpeg4" or video.time_base.denominator <= _MPEG4_LARGEST_CLOCK:
        return video.time_base
    return 1 / video.rate.limit_denominator(1001)
