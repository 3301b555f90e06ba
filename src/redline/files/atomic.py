"""Writes files atomically."""

import os
import tempfile
from pathlib import Path

from redline.errors import RedlineError


class CannotWrite(RedlineError, OSError):
    """A `RedlineError` with a message for the user that callers can also catch as an `OSError`."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot write {str(path)!r}: {error.strerror or error}.")
        self.errno, self.strerror = error.errno, error.strerror

    def __str__(self) -> str:
        return self.args[0]


def write_text(path: Path, text: str) -> None:
    """Writes to a temporary file and renames it, so that readers see the old file or the new one, never a part."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise CannotWrite(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CannotWrite(path, error) from error
        raise


def check_can_write_file(path: Path) -> None:
    """Raises if the file cannot be written, before any work is done. Its folder need not exist yet."""
    if path.is_dir():
        raise RedlineError(f"cannot write {str(path)!r}: it is a folder.")
    check_can_write(path.parent)


def check_can_write(folder: Path) -> None:
    """Raises if files cannot be written into the folder, before any work is done. Does not create the folder."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise RedlineError(f"cannot write into {str(folder)!r}: {str(existing)!r} is not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RedlineError(f"cannot write into {str(folder)!r}: permission denied.")
