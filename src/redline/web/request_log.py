"""Limits how often malformed requests are logged."""

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

LOG_EVERY_S = 10.0


class RequestLogFilter(logging.Filter):
    """Shortens log records of malformed requests to one line, and passes at most one per ten seconds.

    Without this filter, clients could fill the disk or the terminal with log lines.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s, self._last_s, self._dropped = now_s, -LOG_EVERY_S, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._now_s()
        if now_s - self._last_s < LOG_EVERY_S:
            self._dropped += 1
            return False
        dropped, self._last_s, self._dropped = self._dropped, now_s, 0
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
            text = f"refused a malformed HTTP request ({type(error).__name__})"
        record.msg, record.args = text + (f"; {dropped:,} more were not logged" if dropped else ""), ()
        return True
