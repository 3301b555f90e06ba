"""Writes the metrics of a stream to a file of JSON lines, which can be followed while the stream runs."""

import errno
import os
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from redline.errors import RedlineError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows does not have this flag


class MetricsFile:
    """A metrics file. The first `write` creates it, so that a stream that cannot start leaves an old file unchanged."""

    def __init__(self, path: Path, others: Mapping[str, str | Path | None] | None = None) -> None:
        check_output_path(path, others or {})
        if path.is_symlink() and (path.is_file() or not path.exists()):
            raise _is_link(path)
        self._path = path
        self._file: FileIO | None = None

    def write(self, line: str) -> None:
        """Writes the whole line without buffering."""
        left = line.encode()
        try:
            if self._file is None:
                self._file = _opened(self._path)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            # Removes the file if nothing was written to it, for example because the disk is full.
            if self._path.is_file() and not self._path.stat().st_size:
                self._path.unlink()
            raise RedlineError(f"cannot write {str(self._path)!r}: {error.strerror or error}.") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _opened(path: Path) -> FileIO:
    """Opens the file for writing. Raises RedlineError if it has become a symbolic link to a file."""
    if path.exists() and not path.is_file():
        # A link to a pipe or a device, such as /dev/stdout, is allowed: it has no content to lose.
        file = FileIO(os.open(path, os.O_WRONLY), "wb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise _is_link(path)
        return file
    try:
        return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINK, 0o644), "wb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise


def _is_link(path: Path) -> RedlineError:
    text = f"cannot write {str(path)!r}: it is a symbolic link, and its target would be overwritten"
    return RedlineError(f"{text}; give the file itself.")


def check_output_path(path: Path, others: Mapping[str, str | Path | None]) -> None:
    """Raises RedlineError before a stream starts if `path` cannot be written or is among `others` ({name: path})."""
    for name, other in others.items():
        if other is not None and _is_same_file(path, other):
            raise RedlineError(f"cannot write {str(path)!r}: it is the {name}.")
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise RedlineError(f"cannot write {str(path)!r}: {reason}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RedlineError(f"cannot write {str(path)!r}: permission denied.")


def _is_same_file(path: Path, other: str | Path) -> bool:
    """Compares files that may not exist yet; `other` may be a URL that is too long for a file name."""
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)
