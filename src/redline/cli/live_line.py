"""Shows how far a long command is: one live line on a terminal, elsewhere a plain line every 10 seconds.

Where nobody watches, a thread prints the line, so that it also comes while a single step takes minutes.
"""

import time
from dataclasses import dataclass, replace
from threading import Event, RLock, Thread
from types import TracebackType

from rich.markup import escape
from rich.status import Status

from redline.cli.console import progress
from redline.notation import format_seconds

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class _Count:
    """`done` of `total` units at `at_s`, of which earlier runs did `before`.

    The rate is that of this run's work, `done - before`, since it was `first_done` at `first_s`.
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
    """A context manager around long work; `update` and `count` may be called from any thread."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._count: _Count | None = None
        self._began_s = self._printed_s = time.monotonic()
        self._status: Status | None = None
        self._lock, self._stop = RLock(), Event()
        # Bound now: a library may be silenced by putting another file in the place of stderr meanwhile.
        self._out = progress.file
        self._thread = Thread(target=self._repeat, name="redline-live-line", daemon=True)

    def __enter__(self) -> "LiveLine":
        if progress.is_terminal:
            self._status = progress.status(escape(self._text))
            self._status.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._status is not None:
            self._status.stop()
        else:
            self._thread.join()

    def update(self, text: str) -> None:
        """Says what is done now, where it is not known how much of it there is."""
        with self._lock:
            self._count, self._text = None, text
        self._show()

    def count(
        self, what: str, done: float, total: float | None, unit: str, detail: str = "", *, before: float = 0.0
    ) -> None:
        """Says how much is done, with rate and time left; both start anew with another `what` or `unit`.

        `before` is how much of `done` an earlier run did: it counts as done, but not for the rate.
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
        """Starts rate and time left anew with the next `count`: nothing so far was work of the kind that follows."""
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
            if now_s - self._printed_s < LINE_EVERY_S:
                return
            self._printed_s = now_s
            count = self._count
            text = self._text if count is None else count.text(now_s)
            print(" ".join(text.split()) + suffix, file=self._out, flush=True)


def _format_rate(per_s: float, unit: str) -> str:
    """In the unit of time that gives at least one."""
    for seconds, name in ((1, "s"), (60, "min")):
        if per_s * seconds >= 1:
            return f"{per_s * seconds:.3g} {unit}s/{name}"
    return f"{per_s * 3600:.3g} {unit}s/h"
