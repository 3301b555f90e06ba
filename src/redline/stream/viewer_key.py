"""The key that the viewers of a stream must give: from an option, a file or the environment."""

import os
from pathlib import Path

from redline.errors import RedlineError

KEY_VARIABLE = "REDLINE_KEY"
_LONGEST_KEY_BYTES = 1024


def read_key(key: str | None, key_file: Path | None, serves_viewers: bool) -> str | None:
    """Returns `key` or the key in `key_file`. Without either, returns REDLINE_KEY if the stream serves viewers."""
    if key is not None and key_file is not None:
        raise RedlineError("--key and --key-file were both given: give only one.")
    if key_file is not None:
        return _first_line(key_file)
    # An empty environment variable counts as unset.
    return key if key is not None or not serves_viewers else os.environ.get(KEY_VARIABLE) or None


def _first_line(path: Path) -> str:
    """Returns the first line of a key file without surrounding whitespace."""
    try:
        with path.open("rb") as file:
            first, *_ = file.read(_LONGEST_KEY_BYTES + 1).splitlines() or [b""]
        key = first.decode().strip()
    except OSError as error:
        raise RedlineError(f"cannot read the key from {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"the key in {str(path)!r} is not valid UTF-8.") from error
    if not key or len(first) > _LONGEST_KEY_BYTES:
        raise RedlineError(f"{str(path)!r}: the first line must be a key (at most {_LONGEST_KEY_BYTES:,} bytes).")
    return key
