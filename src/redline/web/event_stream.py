"""Parses server-sent events, the form in which OpenAI-compatible servers stream answers."""

from typing import NamedTuple

# A longer line is not a chunk of an answer: the parser must not collect an endless one.
_LONGEST_LINE_BYTES = 16 << 20


class Event(NamedTuple):
    """`name` is empty for most events; servers name those that report an error."""

    name: str
    data: bytes


class EventParser:
    """Collects bytes as they arrive and returns each event when its blank line has arrived.

    >>> parser = EventParser()
    >>> parser.push(b'data: {"a": 1}\\n\\n: a comment\\n\\nda')
    [Event(name='', data=b'{"a": 1}')]
    >>> parser.push(b'ta: [DONE]\\r\\n\\r\\n')
    [Event(name='', data=b'[DONE]')]
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[bytes] = []

    def push(self, data: bytes) -> list[Event]:
        """Raises ValueError if a line is longer than any chunk of an answer."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            raise ValueError("a line of the event stream is too long")
        events: list[Event] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode("utf-8", "replace")
            elif not line:
                if self._data:
                    events.append(Event(self._name, b"\n".join(self._data)))
                self._name, self._data = "", []
        return events
