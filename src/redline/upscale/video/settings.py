"""The settings, the progress and the result of upscaling a video."""

from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError

# Containers that keep time stamps, rotation, colours, chapters and other streams.
TARGETS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm"}


@dataclass(frozen=True)
class VideoSettings:
    """Options for the encoder, and what decides whether the finished parts of an earlier run can be used.

    `model` names the network and its plan, `tiles` holds the tile sizes and the batch size: parts made with other
    values are not used. At most `waiting` batches queue between two stages, which bounds memory for a video of any
    length. A part has `segment_frames` frames; the first parts are shorter. `strip` leaves out all tags but languages.
    """

    model: str = ""
    tiles: tuple[tuple[tuple[int, int], ...], int] | None = None
    codec: str = "auto"
    crf: float | None = None
    preset: str | None = None
    batch: int = 1
    segment_frames: int = 250
    waiting: int = 2
    resume: bool = False
    keep_going: bool = False
    strip: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "segment_frames", "waiting"):
            if getattr(self, name) < 1:
                raise RedlineError(f"{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True)
class VideoProgress:
    """The number of finished frames and, if known, of all frames. The rate counts only frames of this run.

    `notes` has the notes that are known before the work begins; the result has all notes.
    """

    frames_done: int
    frames_total: int | None
    frames_resumed: int
    frames_per_s: float | None
    left_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class VideoResult:
    """The written video; `notes` say what was not kept exactly."""

    target: Path
    frames: int
    frames_resumed: int
    width: int
    height: int
    encoder: str
    seconds: float
    notes: tuple[str, ...]


def target_format(target: Path) -> str:
    """Returns the container for the target's suffix."""
    container = TARGETS.get(target.suffix.lower())
    if container is None:
        suffixes = ", ".join(TARGETS)
        raise RedlineError(
            f"cannot write {target.name!r}: unknown video format {target.suffix!r}; use one of {suffixes}."
        )
    return container
