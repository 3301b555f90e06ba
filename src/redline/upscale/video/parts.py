"""The folder beside the target that holds the finished parts of a video, so that a run can be resumed.

A part is a Matroska file whose frames have the time stamps 0, 1, 2, … ms. The real time stamps, which Matroska would
round, are in a JSON file that is written atomically once the part is complete.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.partial import check_is_free, owner_mark
from redline.files.untrusted import MALFORMED, check_types, field_types, read_json_object
from redline.machine.pinned_copies import PendingCopy
from redline.upscale.video.encoders import Encoder
from redline.upscale.video.frames import Mark
from redline.upscale.video.pixels import to_frame
from redline.upscale.video.probe import VideoInfo
from redline.upscale.video.settings import VideoSettings
from redline.video.reading import opened, reason
from redline.video.writing import open_encoder, open_output

_SAMPLE_BYTES = 1 << 20
# A part has at least this many frames: half a second of most videos, but up to minutes of work on a CPU.
_SHORTEST_PART = 12
_JOB, _OWNER = "job.json", "owner"
_MODEL, _TILES = "the model", "the tiles"
_MILLISECOND = Fraction(1, 1000)
# The decode time stamps of a part are early by this many frames, so that they never exceed the display time stamps:
# no codec delays a frame by more.
_EARLIER = 256
_MPEG4_LARGEST_CLOCK = 65535


@dataclass(frozen=True)
class Part:
    """A finished part, as its JSON file records it.

    `delay` is the largest number of packets by which a frame comes later in the file than in display order. `digest` is
    the digest of the last source frame, and `file_digest` that of the part's file.
    """

    first: int
    pts: tuple[int, ...]
    last_duration: int
    delay: int
    digest: str
    is_end: bool
    file_digest: str
    notes: tuple[str, ...]

    @property
    def mark(self) -> Mark:
        return Mark(self.first + len(self.pts) - 1, self.pts[-1], self.digest)


class PartsFolder:
    def __init__(self, target: Path) -> None:
        self.target, self.path = target, target.parent / f".{target.name}.redline-parts"

    def video_path(self, number: int) -> Path:
        return self.path / f"part-{number:06d}.mkv"

    def partial_path(self, number: int) -> Path:
        return self.video_path(number).with_suffix(".partial")

    def start(self, job: dict[str, Any], resume: bool) -> tuple[list[Part], list[str]]:
        """Returns the usable finished parts and notes on why others are not usable; removes the others."""
        busy = f"another run is writing {str(self.target)!r}: wait for it, or choose another output."
        check_is_free(self.path / _OWNER, busy)
        parts, notes = self._usable(job) if resume else ([], [])
        try:
            if not parts:
                self.remove()
                self.path.mkdir(parents=True)
            write_text(self.path / _OWNER, owner_mark())
            if not parts:
                write_text(self.path / _JOB, json.dumps(job, indent=2))
            kept = {_JOB, _OWNER} | {
                path.name for n in range(len(parts)) for path in (self.video_path(n), self._record(n))
            }
            for path in self.path.iterdir():
                if path.name not in kept:
                    path.unlink()
        except OSError as error:
            raise RedlineError(f"cannot write {str(self.path)!r}: {error.strerror or error}.") from error
        return parts, notes

    def keep(self, number: int, part: Part) -> None:
        """Commits a part: first its video, then the record that marks it complete."""
        self.partial_path(number).replace(self.video_path(number))
        write_text(self._record(number), json.dumps(asdict(part)))

    def remove(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)

    def _record(self, number: int) -> Path:
        return self.video_path(number).with_suffix(".json")

    def _usable(self, job: dict[str, Any]) -> tuple[list[Part], list[str]]:
        if not self.path.exists():
            return [], []
        try:
            before = read_json_object(self.path / _JOB, "record of a job")
            changed = [name for name in job if before.get(name) != job[name]]
        except RedlineError:
            return [], ["the parts of an earlier run are not used: their record cannot be read"]
        if changed:
            return [], [f"the parts of an earlier run are not used: {' and '.join(changed)} changed since"]
        parts: list[Part] = []
        while self._record(len(parts)).exists():
            part = self._checked(len(parts), parts[-1] if parts else None)
            if part is None:
                return parts, [f"part {len(parts)} of an earlier run is damaged: upscaling continues from there"]
            parts.append(part)
        return parts, []

    def _checked(self, number: int, previous: Part | None) -> Part | None:
        """Returns the part if its video is readable and has every frame once, else None."""
        path = self.video_path(number)
        try:
            record = read_json_object(self._record(number), "record of a part")
            check_types(record, field_types(Part), repr(str(self._record(number))))
            record |= {"pts": tuple(record["pts"]), "notes": tuple(record["notes"])}
            part = Part(**record)
            if digest_file(path) != part.file_digest:
                return None
            with opened(path) as container:
                numbers = sorted(packet.pts for packet in container.demux(video=0) if packet.pts is not None)
        except (*MALFORMED, OSError, RedlineError, av.FFmpegError):
            return None
        follows = part.first == (previous.mark.index + 1 if previous else 0)
        return part if follows and part.pts and numbers == list(range(len(part.pts))) else None


def part_end_after(first: int, longest: int) -> int:
    """Returns the index of the first frame after the part that starts at the frame `first`.

    Parts become longer with the number of finished frames. Therefore a short video can be resumed too, an interruption
    loses at most a third of the work, and a long video is not cut into many parts. A resumed run gives the same video,
    because the length of a part depends only on the number of frames before it.
    """
    return first + min(longest, max(_SHORTEST_PART, first // 2))


def tiles_of_parts(target: Path, model: str) -> tuple[tuple[tuple[int, int], ...], int] | None:
    """Returns the tile sizes and the batch size of an unfinished run for this target by this model, if there is one."""
    try:
        job = read_json_object(PartsFolder(target).path / _JOB, "record of a job")
        if job[_MODEL] != model:
            return None
        sizes, batch = job[_TILES]
        tiles, batch = tuple((int(width), int(height)) for width, height in sizes), int(batch)
        return (tiles, batch) if min(batch, *(min(size) for size in tiles)) > 0 else None
    except (*MALFORMED, RedlineError):
        return None


def notes_on_parts(target: Path) -> tuple[str, ...]:
    """Returns a note that finished parts are kept, if there are any."""
    path = PartsFolder(target).path
    if not any(path.glob("part-*.json")):
        return ()
    kept = f"its finished parts are kept in {str(path)!r}"
    return (f"{kept}: --resume continues from them; a run without --resume deletes them",)


def describe_job(video: VideoInfo, encoder: Encoder, settings: VideoSettings, scale: int) -> dict[str, Any]:
    """Returns everything that the finished parts depend on, by the names that messages use."""
    status = video.path.stat()
    return {
        "the video": [status.st_size, status.st_mtime_ns, _sampled_hash(video.path, status.st_size)],
        _MODEL: settings.model,
        _TILES: json.loads(json.dumps(settings.tiles)),
        "the scale": scale,
        "the codec's settings": json.loads(json.dumps(asdict(encoder))),
        "the length of parts": [_SHORTEST_PART, settings.segment_frames],
        "the installed PyAV": [av.__version__, {name: list(v) for name, v in av.library_versions.items()}],
    }


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _sampled_hash(path: Path, size_bytes: int) -> str:
    """Hashes the start, the middle and the end: reading all of a large video would take too long."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start in (0, size_bytes // 2, max(0, size_bytes - _SAMPLE_BYTES)):
            file.seek(start)
            hashed.update(file.read(_SAMPLE_BYTES))
    return hashed.hexdigest()


@dataclass(frozen=True)
class PartEnd:
    """The data that is recorded with the last frame of a part."""

    digest: str
    is_end: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Frame:
    """A frame on its way through the stages. `end` is set for the last frame of a part.

    `pixels` is float32 (1, 3, H, W) before the upscaling. After the upscaling, it holds the planes to encode,
    concatenated into one tensor, so that one copy moves them to the host.
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
        # PyAV's default is slice threading, which would split every frame into slices that are encoded separately.
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
    """Returns the time base for the encoder: that of the video, so that the encoder knows the duration of each frame.

    MPEG-4 does not support fine time bases; its frames are numbered at a constant rate instead.
    """
    if encoder.name != "mpeg4" or video.time_base.denominator <= _MPEG4_LARGEST_CLOCK:
        return video.time_base
    return 1 / video.rate.limit_denominator(1001)
