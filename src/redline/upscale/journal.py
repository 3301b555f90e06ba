"""What is complete: one line for each finished file, with what it was made from and what it must look like.

A file that is there may be half a file, or another model's. It counts as done only when the source is still the one
that was read, the settings are the same, and the result has the bytes that were written.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from redline.upscale.settings import TileSizes
from redline.upscale.tasks import Task

NAME = ".redline-upscale.jsonl"


class Journal:
    """`settings` says everything that decides how a result looks."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.path = folder / NAME
        self._settings = settings
        self._lines: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._lines[entry["target"]] = entry
                except (ValueError, KeyError, TypeError):
                    continue  # a line that a killed run left half written

    def is_done(self, task: Task) -> bool:
        entry = self._lines.get(str(task.target.resolve()))
        if entry is None or entry != {**entry, **self._made_from(task)}:
            return False
        try:
            return task.target.stat().st_size == entry["bytes"] and _digest(task.target) == entry["sha256"]
        except OSError:
            return False

    @property
    def tiles(self) -> TileSizes | None:
        """The tiles that were used before: others would give slightly different pixels."""
        noted = next((e.get("tile") for e in self._lines.values() if e.get("settings") == self._settings), None)
        if isinstance(noted, int):  # as earlier versions noted it
            return ((noted, noted),)
        return tuple((int(width), int(height)) for width, height in noted) if noted else None

    def record(self, task: Task, tiles: TileSizes) -> None:
        size = task.target.stat().st_size
        entry = {"target": str(task.target.resolve()), **self._made_from(task), "tile": tiles, "bytes": size}
        line = json.dumps({**entry, "sha256": _digest(task.target)}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write at the end of the file, so that several workers may share it.
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def _made_from(self, task: Task) -> dict[str, Any]:
        try:
            source = task.source.stat()
        except OSError:
            return {"source": "gone"}
        return {
            "source": str(task.source.resolve()),
            "source_bytes": source.st_size,
            "source_mtime_ns": source.st_mtime_ns,
            "settings": self._settings,
        }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
