"""Recovers live recordings whose process was killed; they are playable as far as they were written."""

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from redline.choices import VIDEO_CONTAINERS
from redline.errors import RedlineError
from redline.files.partial import abandoned_recordings
from redline.video.reading import first_frame, main_stream, opened
from redline.video.truncated import complete_bytes


def recover_recordings(folder: Path) -> tuple[str, ...]:
    """Renames the recordings of killed processes in the folder to `NAME.recovered.mp4`, and deletes those without a
    frame. Returns a note for each."""
    notes = list[str]()
    for left, target in abandoned_recordings(folder):
        if target.suffix.lower() not in VIDEO_CONTAINERS:
            continue
        with suppress(OSError):  # another process was faster, or permission is denied
            if not trim_to_playable(left):
                left.unlink()
                notes.append(f"deleted {left.name!r}, a recording that was killed before its first frame.")
                continue
            kept = _unused_name(target)
            os.rename(left, kept)
            notes.append(f"recovered {kept.name!r}, a recording that was killed.")
    return tuple(notes)


def trim_to_playable(path: Path) -> bool:
    """Removes the incomplete part at the end of the file. Returns whether the rest has a frame."""
    os.truncate(path, complete_bytes(path))
    try:
        with opened(path) as video:
            first_frame(video, main_stream(video, path), path)
    except RedlineError:
        return False
    return True


def _unused_name(target: Path) -> Path:
    """Returns a path beside the target that does not exist."""
    names = (f"{target.stem}.recovered{f'-{number}' if number > 1 else ''}{target.suffix}" for number in count(1))
    return next(path for name in names if not (path := target.with_name(name)).exists())
