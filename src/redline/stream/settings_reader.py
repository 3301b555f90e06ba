"""Changes the settings of a running stream by lines from stdin, a named pipe or a growing file.

An invalid line is logged and ignored.
"""

import os
import select
import shlex
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import shorten
from redline.stream.settings import LiveSettings

_STDIN = "-"
# The interval in seconds between checks for the end of the stream and for new lines in a file.
_POLL_S = 0.1
_LONGEST_LINE = 16 * 1024
# How many of the bytes read last are compared to detect that a file was rewritten.
_REMEMBERED = 4096


def parse_change(line: str) -> dict[str, Any]:
    """Parses a line such as `strength=0.4 steps=2 control=0.5,1 prompt="a red fox"`, in any order."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise RedlineError(f"{shorten(line)} cannot be parsed: {str(error).lower()}.") from error
    changes: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise RedlineError(f"invalid change {shorten(word)}: write a name and a value, as in strength=0.4.")
        parse = {"strength": float, "steps": int, "seed": int, "control": parse_numbers}.get(name, str)
        try:
            changes[name] = parse(value)
        except ValueError as error:
            raise RedlineError(f"invalid value {shorten(value)} for {name}.") from error
    return changes


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",")) if text.strip() else ()


class SettingsReader:
    """A context in which lines from `place` (a path, or - for stdin) change the settings."""

    def __init__(self, place: str, settings: LiveSettings, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
        self._ended = threading.Event()
        self._file, self._grows = _open(place)
        self._thread = threading.Thread(target=self._read, name="settings", daemon=True)

    def __enter__(self) -> "SettingsReader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        os.close(self._file)

    def _read(self) -> None:
        for line in self._lines():
            try:
                if changes := parse_change(line):
                    self._settings.change(**changes)
                    self._log("changed " + ", ".join(f"{name} to {value}" for name, value in changes.items()))
            except RedlineError as error:
                self._log(str(error))

    def _lines(self) -> Iterator[str]:
        # `initial` counts the bytes that the file held already when it was opened.
        text, read, ended, initial = b"", b"", False, os.fstat(self._file).st_size
        while not ended:  # lines that came before the end of the stream are still read
            ended = self._ended.is_set()
            if not select.select([self._file], [], [], _POLL_S)[0]:
                continue
            if self._was_rewritten(read):
                os.lseek(self._file, 0, os.SEEK_SET)
                text, read, initial = b"", b"", 0
            piece = os.read(self._file, min(initial, _LONGEST_LINE) or _LONGEST_LINE)
            read = (read + piece)[-_REMEMBERED:]
            if not piece and not self._grows:
                yield text.decode(errors="replace")
                return
            if not piece:
                self._ended.wait(_POLL_S)
            if initial and len(piece) == initial:
                piece += b"\n"  # the initial content is complete; later additions are complete when their line ends
            initial = max(0, initial - len(piece))
            *lines, text = (text + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if len(text) > _LONGEST_LINE:
                self._log(f"ignored a line of more than {_LONGEST_LINE:,} characters.")
                text = b""
        if text.strip():
            self._log(f"ignored {text.decode(errors='replace')!r}: the line has no end.")

    def _was_rewritten(self, read: bytes) -> bool:
        """Returns whether the bytes read last have changed in the file, as after `>` instead of `>>`."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return False
        return os.pread(self._file, len(read), os.lseek(self._file, 0, os.SEEK_CUR) - len(read)) != read


def _open(place: str) -> tuple[int, bool]:
    """Returns the file descriptor, and whether more data may come after the end was reached."""
    if place == _STDIN:
        with suppress(OSError, AttributeError, ValueError):
            return os.dup(sys.stdin.fileno()), False
        raise RedlineError("--changes -: this process has no stdin; name a file.")
    path = Path(place)
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise RedlineError(f"cannot read changes from {place!r}: it is neither a file nor a named pipe.")
        # A pipe is also opened for writing, because it then does not end when its writer closes it.
        return os.open(path, os.O_RDWR if stat.S_ISFIFO(kind) else os.O_RDONLY), True
    except OSError as error:
        raise RedlineError(f"cannot read changes from {place!r}: {error.strerror}.") from error
