"""Malformed requests cannot flood the log, and connections that wait cannot keep viewers out."""

import logging
import sys

from aiohttp.http_exceptions import BadHttpMessage

from redline.web.acceptor import PendingConnections
from redline.web.request_log import LOG_EVERY_S, RequestLogFilter


def record(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except type(error):
        place = ("aiohttp.server", logging.ERROR, "web_protocol.py", 1)
        return logging.LogRecord(*place, "Error handling request from %s", ("::1",), sys.exc_info())


def test_one_line_in_ten_seconds_says_how_many_were_skipped() -> None:
    now_s = [100.0]
    log = RequestLogFilter(lambda: now_s[0])
    first, last = record(BadHttpMessage("x" * 1000)), record(BadHttpMessage("y"))
    assert log.filter(first) and not first.exc_info and first.levelno == logging.WARNING
    assert first.getMessage() == "refused a malformed HTTP request (BadHttpMessage)"
    assert not any(log.filter(record(BadHttpMessage("z"))) for _ in range(7))
    now_s[0] += LOG_EVERY_S
    assert log.filter(last) and last.getMessage().endswith("; 7 more were not logged")


def test_a_fault_of_the_server_itself_keeps_its_traceback() -> None:
    fault = record(ZeroDivisionError("ours"))
    assert RequestLogFilter().filter(fault) and fault.exc_info and fault.levelno == logging.ERROR
    assert fault.getMessage() == "Error handling request from ::1"


def test_one_address_ends_its_own_and_one_too_many_ends_the_oldest() -> None:
    waiting = PendingConnections(4, 2)
    assert [waiting.add(name, "a") for name in ("a1", "a2")] == [None, None]
    assert waiting.add("b1", "b") is None
    assert waiting.add("a3", "a") == "a1"
    assert waiting.add("c1", "c") is None
    assert waiting.add("d1", "d") == "a2"
    waiting.remove("b1")
    waiting.remove("b1")
    assert waiting.add("a4", "a") is None
