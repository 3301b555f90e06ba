"""The journal of finished files, so that a resumed run can skip them.

An existing result may be incomplete or come from another model. It counts as done only if the source has not changed,
the settings are the same, and the result still has the recorded digest.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import MALFORMED, check_types, parse_json
from redline.upscale.settings import Tiles
from redline.upscale.tasks import Task

NAME = ".redline-upscale.jsonl"
_TYPES: dict[str, Any] = {
    "target": str,
    "bytes": int,
    "sha256": str,
    "tile": tuple[tuple[int, int], ...] | None,
    "batch": int | None,
}


class Journal:
    """The journal of a folder. `made_as` returns a description of everything that determines a task's result."""

    def __init__(self, folder: Path, made_as: Callable[[Task], str]) -> None:
        self.path = folder / NAME
        self._made_as = made_as
        self._writing = Lock()
        self._lines: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_bytes().split(b"\n"):
                # Skips an incomplete line, which a killed run may leave.
                with suppress(*MALFORMED, RedlineError):
                    entry = parse_json(line, repr(str(self.path)), check_characters=False)
                    check_types(entry, _TYPES, repr(str(self.path)))
                    if {"target", "bytes", "sha256"} <= entry.keys():
                        self._lines[entry["target"]] = entry

    def is_done(self, task: Task) -> bool:
        entry, state = self._lines.get(str(task.target.resolve())), task.source_state()
        if entry is None or state is None or entry != {**entry, **self._made_from(task, state)}:
            return False
        try:
            return task.target.stat().st_size == entry["bytes"] and _digest(task.target) == entry["sha256"]
        except OSError:
            return False

    def tiles(self, tasks: Iterable[Task], chosen_for: str | None = None) -> Tiles | None:
        """Returns the tiles that an earlier run used for one of these tasks, to get the same pixels again.

        If `chosen_for`, a digest of image sizes, is given, ignores tiles that were chosen for other sizes.
        """
        for task in tasks:
            entry = self._lines.get(str(task.target.resolve()), {})
            noted = entry.get("tile")
            is_for_these = chosen_for is None or entry.get("for") == chosen_for
            if noted and is_for_these and entry.get("settings") == self._made_as(task):
                tiles, batch = tuple((width, height) for width, height in noted), entry.get("batch")
                if min(min(size) for size in tiles) > 0 and (batch is None or batch > 0):
                    return Tiles(tiles, batch)
        return None

    def record(self, task: Task, source_state: tuple[int, int] | None, tiles: Tiles) -> None:
        """Records a finished task. `source_state` is the state of the source before it was read."""
        size, made_from = task.target.stat().st_size, self._made_from(task, source_state)
        noted = {"tile": tiles.sizes, "batch": tiles.batch, "for": tiles.chosen_for}
        noted |= {"bytes": size, "sha256": _digest(task.target)}
        line = json.dumps({"target": str(task.target.resolve()), **made_from, **noted}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing:
            self._append(line.encode())

    def _append(self, data: bytes) -> None:
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # ends an incomplete line that a killed run left
            written = os.write(handle, data)
            if written < len(data):  # an incomplete line would damage the next one
                os.ftruncate(handle, os.fstat(handle).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)

    def _made_from(self, task: Task, source_state: tuple[int, int] | None) -> dict[str, Any]:
        size, changed = source_state or (None, None)
        return {
            "source": str(task.source.resolve()),
            "source_bytes": size,
            "source_mtime_ns": changed,
            "settings": self._made_as(task),
        }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
