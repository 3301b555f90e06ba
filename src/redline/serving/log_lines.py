"""Log lines of a server: sentences for people, or one JSON object a line for programs, with a line per request."""

import logging
import sys
import time
from typing import TextIO

import msgspec

_LOGGERS = ("redline.serving", "redline.web")


class JsonLines(logging.Formatter):
    """Formats records as JSON objects; a record of a request is one already."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == "redline.serving.requests":
            return text
        fields = {"time": record.created, "level": record.levelname.lower(), "message": text}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def write_log(as_json: bool, out: TextIO | None = None) -> logging.Handler:
    """Writes the server's log to stderr, and returns the handler. Requests are logged as JSON only."""
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if as_json else logging.WARNING)
        logger.addHandler(handler)
        logger.propagate = False
    return handler


def log_event(event: str, **fields: object) -> str:
    """Returns an event of the server as one line of JSON."""
    return msgspec.json.encode({"time": time.time(), "level": "info", "message": event, **fields}).decode()
