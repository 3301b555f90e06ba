"""The cache of compiled code on this machine: later climbs reuse the code that earlier climbs compiled."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from redline.machine.machine import cache_folder

_MOST_BYTES = 4 * 2**30


def compile_cache(most_bytes: int = _MOST_BYTES) -> Path:
    """Returns the folder of the cache; first removes the oldest entries if the cache has become too large."""
    folder = cache_folder() / "compiled"
    entries = sorted(_entries(folder), reverse=True)
    held = 0
    for _, path in entries:
        held += _bytes(path)
        if held > most_bytes:
            shutil.rmtree(path, ignore_errors=True)
    return folder


def _entries(folder: Path) -> Iterator[tuple[float, Path]]:
    """Yields the folders that the compilers made, each with the time of its last change."""
    for path in folder.glob("*/*"):
        with suppress(OSError):  # another climb may have removed the folder
            yield path.stat().st_mtime, path


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
