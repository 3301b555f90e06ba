"""Locks the output folder of a climb, so that two climbs cannot write into the same files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import check_can_write

_NAME = ".climb.lock"


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Creates the folder if necessary and holds its lock; the system releases the lock if the process is killed."""
    if folder is None:
        yield
        return
    check_can_write(folder)
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    file = _lock(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
        with suppress(OSError):
            for place in created:
                place.rmdir()  # fails if the folder contains files, which are kept


def _lock(path: Path, folder: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(file, 20).decode(errors="replace").strip()
            os.close(file)
            process = f" (process {owner})" if owner else ""
            raise RedlineError(
                f"another climb{process} is writing to {str(folder)!r}: wait until it has ended, or choose another "
                "folder with --out."
            ) from None
        with suppress(FileNotFoundError):
            # An earlier climb may have deleted the file after this process opened it and before this process locked it.
            if os.path.samestat(os.fstat(file), path.stat()):
                os.ftruncate(file, 0)
                os.write(file, str(os.getpid()).encode())
                return file
        os.close(file)
