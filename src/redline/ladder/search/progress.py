"""Progress of a climb, a verification or a benchmark, as a callback."""

import sys
import time
from collections.abc import Callable

from redline.ladder.measurement import Measurement

# Called with a line of text for each event, and with the measurement when the event is one.
Progress = Callable[[str, Measurement | None], None]

_EVERY_S = 10.0


class _Printer:
    """Prints lines to stderr: to a terminal every measurement, but no events.

    If stderr is not a terminal, prints events and measurements, but at most one line in ten seconds.
    """

    def __init__(self) -> None:
        self._printed_s = float("-inf")

    def __call__(self, text: str, measurement: Measurement | None) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if terminal and measurement is None:
            return
        if terminal or time.monotonic() - self._printed_s >= _EVERY_S:
            self._printed_s = time.monotonic()
            reason = f" ({measurement.reason})" if measurement is not None else " …"
            print(f"redline: {text}{reason}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return "print_progress"


print_progress: Progress = _Printer()


def no_progress(_text: str, _measurement: Measurement | None) -> None:
    """Reports nothing."""
