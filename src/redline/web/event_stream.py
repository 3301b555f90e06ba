"""Parses server-sent events, the format in which OpenAI-compatible servers stream answers."""

from typing import NamedTuple

# Longer lines are refused, so that the parser does not buffer an endless line. Chunks of answers are shorter.
_LONGEST_LINE_BYTES = 16 << 20


class Event(NamedTuple):
    """Holds one event. `name` is empty for most events, because servers name only those that report an error."""

    name: str
    data: bytes


class EventParser:
    """Collects bytes as they arrive, and returns each event when the blank line that ends it has arrived.

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
        """Adds bytes, and returns the events that are now complete. Raises ValueError if a line is too long."""
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
