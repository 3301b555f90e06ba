"""Reads the key that viewers need from a file or the environment, where the process list does not show it."""

import os
from pathlib import Path

from redline.errors import RedlineError

KEY_VARIABLE = "REDLINE_KEY"
_LONGEST_BYTES = 1024


def read_key(key: str | None, key_file: Path | None, serves_viewers: bool) -> str | None:
    """Returns `key`, the content of `key_file`, or the environment variable if the stream serves viewers."""
    if key is not None and key_file is not None:
        raise RedlineError("--key and --key-file were both given: give only one.")
    if key_file is not None:
        return _read(key_file)
    # An empty variable counts as unset.
    return key if key is not None or not serves_viewers else os.environ.get(KEY_VARIABLE) or None


def _read(path: Path) -> str:
    """Returns the first line without surrounding whitespace."""
    try:
        with path.open("rb") as file:
            first, *_ = file.read(_LONGEST_BYTES + 1).splitlines() or [b""]
        key = first.decode().strip()
    except OSError as error:
        raise RedlineError(f"cannot read the key from {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"the key in {str(path)!r} is not valid UTF-8.") from error
    if not key or len(first) > _LONGEST_BYTES:
        raise RedlineError(f"{str(path)!r}: the first line must be a key (at most {_LONGEST_BYTES:,} bytes).")
    return key
