"""Shows the progress of a long command: one live line on a terminal, otherwise a plain line every 10 seconds.

Without a terminal a thread prints the line, so that it also appears while a single step takes minutes.
"""

import time
from dataclasses import dataclass, replace
from threading import Event, RLock, Thread

from rich.markup import escape
from rich.status import Status

from redline.cli.console import progress
from redline.notation import format_seconds

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class _Count:
    """Progress: at the time `at_s`, `done` of `total` units are done; earlier runs did `before` of them.

    The rate counts only the work of this run since the time `first_s`, when this run had done `first_done` units.
    """

    what: str
    unit: str
    total: float | None
    first_done: float
    first_s: float
    done: float
    at_s: float
    detail: str
    before: float = 0.0

    def text(self, now_s: float) -> str:
        parts = [f"{self.what}: {self._amount}"]
        worked_s = self.at_s - self.first_s
        worked = self.done - self.before - self.first_done
        if worked > 0 and worked_s > 0:
            rate = worked / worked_s
            parts += [_format_rate(rate, self.unit)] if self.total != 1 else []
            if self.total is not None:
                left_s = max(1.0, (self.total - self.done) / rate - (now_s - self.at_s))
                parts.append(f"{format_seconds(round(left_s))} left")
        return ", ".join(parts) + (f" · {self.detail}" if self.detail else "")

    @property
    def _amount(self) -> str:
        if self.total is None:
            return f"{int(self.done):,} {self.unit}s"
        share = self.done / self.total if self.total else 1.0
        if self.total == 1:
            return f"{share:.0%}"
        return f"{int(self.done):,} of {int(self.total):,} {self.unit}s ({share:.0%})"


class LiveLine:
    """A context manager for long work; `update` and `count` may be called from any thread.

    With `shown=False` it prints nothing, as on the ranks of a command that another rank reports on.
    """

    def __init__(self, text: str, shown: bool = True) -> None:
        self._text, self._shown = text, shown
        self._count: _Count | None = None
        self._began_s = self._printed_s = time.monotonic()
        self._status: Status | None = None
        self._lock, self._stop = RLock(), Event()
        # Stored, because stderr is replaced while a library is silenced.
        self._out = progress.file
        self._thread = Thread(target=self._repeat, name="redline-live-line", daemon=True)

    def __enter__(self) -> "LiveLine":
        if not self._shown:
            return self
        if progress.is_terminal:
            self._status = progress.status(escape(self._text))
            self._status.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._status is not None:
            self._status.stop()
        elif self._shown:
            self._thread.join()

    def update(self, text: str) -> None:
        """Shows a text instead of a count."""
        with self._lock:
            self._count, self._text = None, text
        self._show()

    def count(
        self, what: str, done: float, total: float | None, unit: str, detail: str = "", *, before: float = 0.0
    ) -> None:
        """Shows how much is done, the rate and the time left; rate and time restart if `what` or `unit` changes.

        `before` is the part of `done` that an earlier run did; the rate excludes this part.
        """
        with self._lock:
            now_s, last = time.monotonic(), self._count
            if last is None or (last.what, last.unit) != (what, unit) or done < last.done:
                self._count = _Count(what, unit, total, done - before, now_s, done, now_s, detail, before)
            elif done == last.done:
                self._count = replace(last, total=total, detail=detail, before=before)
            else:
                self._count = replace(last, total=total, done=done, at_s=now_s, detail=detail, before=before)
            self._text = self._count.text(now_s)
        self._show()

    def restart(self) -> None:
        """Restarts rate and time left at the next `count`, for example because a warm-up has ended."""
        with self._lock:
            self._count = None

    def _show(self) -> None:
        if self._status is not None:
            self._status.update(escape(self._text))
        else:
            self._print_if_due("")

    def _repeat(self) -> None:
        while not self._stop.wait(max(self._printed_s + LINE_EVERY_S - time.monotonic(), 0.02)):
            elapsed_s = time.monotonic() - self._began_s
            self._print_if_due(f" ({format_seconds(elapsed_s)} so far)")

    def _print_if_due(self, suffix: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            if not self._shown or now_s - self._printed_s < LINE_EVERY_S:
                return
            self._printed_s = now_s
            count = self._count
            text = self._text if count is None else count.text(now_s)
            print(" ".join(text.split()) + suffix, file=self._out, flush=True)


def _format_rate(per_s: float, unit: str) -> str:
    """Returns the rate per second, minute or hour: the first of these that is at least one."""
    for seconds, name in ((1, "s"), (60, "min")):
        if per_s * seconds >= 1:
            return f"{per_s * seconds:.3g} {unit}s/{name}"
    return f"{per_s * 3600:.3g} {unit}s/h"
