"""The log of the page's server: malformed requests write one short line, and at most one line per ten seconds, so that
clients cannot flood the disk or the terminal."""

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

EVERY_S = 10.0


class RequestLogFilter(logging.Filter):
    """Shortens records of malformed requests, and drops records that come too soon after the previous one."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s, self._last_s, self._dropped = now_s, -EVERY_S, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._now_s()
        if now_s - self._last_s < EVERY_S:
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


def request_logger() -> logging.Logger:
    """Returns a new logger for one server."""
    logger = logging.Logger("redline.stream.browser")
    logger.parent = logging.getLogger()
    logger.addFilter(RequestLogFilter())
    return logger
