"""Formats the log of a server: as plain text, or as one JSON object per line, then also with a line per request."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

# The messages of this logger are already JSON objects.
_READY_MADE = "redline.serving.requests"
_LOGGERS = ("redline.serving", "redline.web")


class JsonLines(logging.Formatter):
    """Formats log records as JSON objects. The messages of the request logger are already JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == _READY_MADE:
            return text
        fields = {"time": record.created, "level": record.levelname.lower(), "message": text}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


@contextmanager
def written_log(as_json: bool) -> Iterator[None]:
    """Writes the server's log to stderr while the block runs. Requests are logged only with `as_json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if as_json else logging.WARNING)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def log_event(event: str, **fields: object) -> None:
    """Logs an event of the server as one line of JSON."""
    values = {"time": time.time(), "level": "info", "message": event, **fields}
    logging.getLogger(_READY_MADE).info("%s", msgspec.json.encode(values).decode())
