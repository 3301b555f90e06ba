"""Files that are never half written."""

import os
import tempfile
from pathlib import Path

from redline.errors import RedlineError


def write_text(path: Path, text: str) -> None:
    """Writes beside and renames, so that a reader sees the old file or the new one, never a part."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise RedlineError(f"cannot write {str(path)!r}: {error.strerror or error}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
