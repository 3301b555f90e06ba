"""The key that viewers must know, from where the process list does not show it: a file, or the environment."""

import os
from pathlib import Path

from redline.errors import RedlineError

KEY_VARIABLE = "REDLINE_KEY"
_LONGEST_BYTES = 1024


def read_key(key: str | None, key_file: Path | None, is_needed: bool) -> str | None:
    """Returns the key of --key, of --key-file, or of the environment. The last is for all streams: one that serves no
    viewers ignores it."""
    if key is not None and key_file is not None:
        raise RedlineError("give the key with --key or with --key-file, not with both.")
    if key_file is not None:
        return _read(key_file)
    # A variable that is set to nothing says nothing.
    return key if key is not None or not is_needed else os.environ.get(KEY_VARIABLE) or None


def _read(path: Path) -> str:
    """Returns the first line, without the spaces around it."""
    try:
        with path.open("rb") as file:
            first, *_ = file.read(_LONGEST_BYTES + 1).splitlines() or [b""]
        key = first.decode().strip()
    except OSError as error:
        raise RedlineError(f"cannot read the key from {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"the key in {str(path)!r} is no text.") from error
    if not key or len(first) > _LONGEST_BYTES:
        raise RedlineError(f"{str(path)!r}: no key in the first line (at most {_LONGEST_BYTES:,} bytes).")
    return key
