"""Settings changed while a stream runs by whoever has no page: lines from a keyboard, a pipe or a file that grows.

A line that makes no sense is said and passed over: a stream does not end because of one.
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
from types import TracebackType
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import shorten
from redline.stream.settings import LiveSettings

_KEYBOARD = "-"
# How long the end of the stream may wait for who reads lines; and what is added to a file for being read.
_LOOK_EVERY_S = 0.1
_LONGEST_LINE = 16 * 1024
# Bytes by which a file is known to be the one that was read.
_REMEMBERED = 4096


def parse_change(line: str) -> dict[str, Any]:
    """`strength=0.4 steps=2 control=0.5,1 prompt="a red fox"`: any of them, in any order."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise RedlineError(f"{shorten(line)} cannot be read: {str(error).lower()}.") from error
    changes: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise RedlineError(f"a change is a name and a value, as in strength=0.4, not {shorten(word)}.")
        changes[name] = _value(name, value)
    return changes


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",")) if text.strip() else ()


def _value(name: str, text: str) -> Any:
    try:
        if name == "control":
            return numbers(text)
        return {"strength": float, "steps": int, "seed": int}.get(name, str)(text)
    except ValueError as error:
        raise RedlineError(f"{name} cannot be {shorten(text)}.") from error


class SettingsReader:
    """A context in which lines from `place` (a path, or - for the keyboard) change the settings."""

    def __init__(self, place: str, settings: LiveSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._over = threading.Event()
        self._file, self._grows = _open(place)
        self._thread = threading.Thread(target=self._read, name="changes", daemon=True)

    def __enter__(self) -> "SettingsReader":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        os.close(self._file)

    def _read(self) -> None:
        for line in self._lines():
            try:
                if changes := parse_change(line):
                    self._settings.change(**changes)
                    self._say("changed " + ", ".join(f"{name} to {value}" for name, value in changes.items()))
            except RedlineError as error:
                self._say(str(error))

    def _lines(self) -> Iterator[str]:
        text, read, over, held = b"", b"", False, os.fstat(self._file).st_size
        while not over:  # what came before the end is still heard
            over = self._over.is_set()
            if not select.select([self._file], [], [], _LOOK_EVERY_S)[0]:
                continue
            if self._is_written_anew(read):
                os.lseek(self._file, 0, os.SEEK_SET)
                text, read, held = b"", b"", 0
            piece = os.read(self._file, min(held, _LONGEST_LINE) or _LONGEST_LINE)
            read = (read + piece)[-_REMEMBERED:]
            if not piece and not self._grows:
                yield text.decode(errors="replace")
                return
            if not piece:
                self._over.wait(_LOOK_EVERY_S)
            if held and len(piece) == held:
                piece += b"\n"  # what a file holds already is whole; what is added is so when its line is ended
            held = max(0, held - len(piece))
            *lines, text = (text + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if len(text) > _LONGEST_LINE:
                self._say(f"a line of more than {_LONGEST_LINE:,} characters is no change of settings.")
                text = b""
        if text.strip():
            self._say(f"{text.decode(errors='replace')!r} has changed nothing: its line was not ended.")

    def _is_written_anew(self, read: bytes) -> bool:
        """Whether a file no longer holds what was read of it last: `>` was meant where `>>` would add to it."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return False
        return os.pread(self._file, len(read), os.lseek(self._file, 0, os.SEEK_CUR) - len(read)) != read


def _open(place: str) -> tuple[int, bool]:
    """The file, and whether more may come where it ends."""
    if place == _KEYBOARD:
        with suppress(OSError, AttributeError, ValueError):
            return os.dup(sys.stdin.fileno()), False
        raise RedlineError("there is no keyboard and no pipe to read changes from: name a file.")
    path = Path(place)
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise RedlineError(f"changes are read from a file or a pipe, which {place!r} is not.")
        # A pipe is opened for writing too: it then has no end when whoever wrote a line to it has gone.
        return os.open(path, os.O_RDWR if stat.S_ISFIFO(kind) else os.O_RDONLY), True
    except OSError as error:
        raise RedlineError(f"changes cannot be read from {place!r}: {error.strerror}.") from error
