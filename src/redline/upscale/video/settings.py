"""The settings, the progress and the result of upscaling a video."""

from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError

# Containers that keep time stamps, rotation, colours, chapters and other streams.
TARGETS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm"}


@dataclass(frozen=True)
class VideoSettings:
    """Options for the encoder, and the values that decide whether finished parts of an earlier run can be used.

    `model` names the network and its plan, `tiles` holds the tile sizes and the batch size: parts made with other
    values are not used. A part has `segment_frames` frames; the first parts are shorter. `strip` omits all tags except
    languages.
    """

    model: str = ""
    tiles: tuple[tuple[tuple[int, int], ...], int] | None = None
    codec: str = "auto"
    crf: float | None = None
    segment_frames: int = 250
    resume: bool = False
    keep_going: bool = False
    strip: bool = False


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
        unknown = f"cannot write {target.name!r}: unknown video format {target.suffix!r}"
        raise RedlineError(f"{unknown}; use one of {', '.join(TARGETS)}.")
    return container
