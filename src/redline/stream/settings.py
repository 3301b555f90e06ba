"""The settings that may change while a stream runs. They are changed by lines from stdin, a pipe or a file.

Each frame uses one immutable snapshot. An invalid line is logged and ignored.
"""

import math
import os
import select
import shlex
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import shorten

_MOST_STEPS = 1000
_LONGEST_PROMPT = 2000
_SEEDS = 1 << 63
_STDIN = "-"
# The interval in seconds between checks for the end of the stream and for new lines in a file.
_POLL_S = 0.1
_LONGEST_LINE = 16 * 1024
# This many of the bytes read last are compared with the file, to detect that it was rewritten.
_REMEMBERED = 4096


@dataclass(frozen=True)
class Settings:
    """`strength` limits how far the output departs from the input, `control` is the model's control vector, and
    `prompt` describes the image to a model with a text encoder."""

    strength: float = 0.5
    steps: int = 1
    seed: int = 0
    control: tuple[float, ...] = ()
    prompt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise RedlineError(f"strength must be a number from 0 to 1, not {self.strength}.")
        if not 1 <= self.steps <= _MOST_STEPS or self.steps != int(self.steps):
            raise RedlineError(f"steps must be a whole number from 1 to {_MOST_STEPS}, not {self.steps}.")
        if not 0 <= self.seed < _SEEDS or self.seed != int(self.seed):
            raise RedlineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}.")
        if not all(math.isfinite(value) for value in self.control):
            raise RedlineError(f"control must be a list of finite numbers, not {list(self.control)}.")
        if not isinstance(self.prompt, str) or len(self.prompt) > _LONGEST_PROMPT:
            raise RedlineError(f"the prompt must be a string of at most {_LONGEST_PROMPT:,} characters.")
        # The sliders of the page may send whole numbers as 2.0.
        for name, value in (("steps", int(self.steps)), ("seed", int(self.seed)), ("strength", float(self.strength))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "control", tuple(float(value) for value in self.control))


class LiveSettings:
    """The current settings, read by the pipeline once per frame and changed from any thread.

    `check` raises RedlineError for settings that the model does not support, so that `change` refuses them.
    """

    def __init__(
        self, settings: Settings | None = None, check: Callable[[Settings], None] = lambda settings: None
    ) -> None:
        self._lock = threading.Lock()
        self._now, self._check = settings or Settings(), check
        check(self._now)

    def now(self) -> Settings:
        return self._now

    def change(self, **changes: Any) -> Settings:
        """Applies all changes, or none if one of them is invalid."""
        names = [field.name for field in fields(Settings)]
        for name in changes:
            if name not in names:
                raise RedlineError(f"unknown setting {name!r} (supported: {', '.join(names)}).")
        with self._lock:
            try:
                changed = replace(self._now, **changes)
            except TypeError as error:
                raise RedlineError(f"invalid settings {changes}: {error}.") from error
            self._check(changed)
            self._now = changed
            return changed


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
        # `initial` counts the bytes that the file already had when it was opened.
        text, read, ended, initial = b"", b"", False, os.fstat(self._file).st_size
        while not ended:  # lines written before the end of the stream are still read
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
                piece += b"\n"  # the last initial line may lack a newline, but all later lines must have one
            initial = max(0, initial - len(piece))
            *lines, text = (text + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if len(text) > _LONGEST_LINE:
                self._log(f"ignored a line of more than {_LONGEST_LINE:,} characters.")
                text = b""
        if text.strip():
            self._log(f"ignored {text.decode(errors='replace')!r}: the line does not end with a newline.")

    def _was_rewritten(self, read: bytes) -> bool:
        """Returns whether the most recently read bytes have changed in the file, for example by `>` instead of `>>`."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return False
        return os.pread(self._file, len(read), os.lseek(self._file, 0, os.SEEK_CUR) - len(read)) != read


def _open(place: str) -> tuple[int, bool]:
    """Returns the file descriptor, and whether data may still be added after its end was reached."""
    if place == _STDIN:
        with suppress(OSError, AttributeError, ValueError):
            return os.dup(sys.stdin.fileno()), False
        raise RedlineError("--changes -: this process has no stdin; name a file.")
    path = Path(place)
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise RedlineError(f"cannot read changes from {place!r}: it is neither a file nor a named pipe.")
        # Opens a pipe for writing as well; otherwise reading would reach the end when the last writer closes it.
        return os.open(path, os.O_RDWR if stat.S_ISFIFO(kind) else os.O_RDONLY), True
    except OSError as error:
        raise RedlineError(f"cannot read changes from {place!r}: {error.strerror}.") from error
