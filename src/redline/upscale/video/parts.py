"""The folder beside the target that holds the finished parts of a video, so that a run can be resumed.

A part is a Matroska file whose frames have the time stamps 0, 1, 2, … ms. The real time stamps, which Matroska would
round, are in a JSON file that is written atomically once the part is complete.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.partial import check_is_free, owner_mark
from redline.files.untrusted import MALFORMED, check_types, field_types, read_json_object
from redline.upscale.video.encoders import Encoder
from redline.upscale.video.frames import Mark
from redline.upscale.video.probe import VideoInfo
from redline.upscale.video.settings import VideoSettings
from redline.video.reading import opened

_SAMPLE_BYTES = 1 << 20
# Half a second of most videos: on a CPU that can be minutes of work.
_SHORTEST_PART = 12
_JOB, _OWNER = "job.json", "owner"
_MODEL, _TILES = "the model", "the tiles"


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
            part = Part(**{**record, "pts": tuple(record["pts"]), "notes": tuple(record["notes"])})
            if digest_file(path) != part.file_digest:
                return None
            with opened(path) as container:
                numbers = sorted(packet.pts for packet in container.demux(video=0) if packet.pts is not None)
        except (*MALFORMED, OSError, RedlineError, av.FFmpegError):
            return None
        follows = part.first == (previous.mark.index + 1 if previous else 0)
        return part if follows and part.pts and numbers == list(range(len(part.pts))) else None


def part_end_after(first: int, longest: int) -> int:
    """Returns the index of the frame before which a part that starts at `first` ends.

    Parts become longer with the number of finished frames. So a short video can be resumed too, a stop costs at most a
    third of the work, and a long video is not cut into many parts. A resumed run gives the same video, because the
    length of a part depends on nothing else.
    """
    return first + min(longest, max(_SHORTEST_PART, first // 2))


def tiles_of_parts(target: Path, model: str) -> tuple[tuple[tuple[int, int], ...], int] | None:
    """Returns the tiles of an unfinished run for this target with the same model, if there is one."""
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
    """Returns all that the finished parts depend on, by the names that messages use."""
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
