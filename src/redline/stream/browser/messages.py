"""Parses the messages of a page, which are untrusted: an invalid one raises MessageError."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from redline.errors import RedlineError

# An offer of three video tracks has about 6 kB.
LONGEST_MESSAGE_BYTES = 64 * 1024
LINES = ("camera", "output", "input")


class MessageError(RedlineError):
    """Raised for an invalid message; `about` is its message type."""

    def __init__(self, text: str, about: str = "message") -> None:
        super().__init__(text)
        self.about = about


@dataclass(frozen=True)
class Offer:
    """A WebRTC offer; `lines` names its video tracks in order."""

    sdp: str = field(repr=False)
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    settings: dict[str, Any]


@dataclass(frozen=True)
class Ping:
    """`sent` is a time of the page's clock, and is returned unchanged."""

    sent: float


@dataclass(frozen=True)
class Stop:
    """Asks to close the WebRTC connection."""


def read(text: str) -> Offer | Change | Ping | Stop:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError("the message is not valid JSON.") from error
    if not isinstance(message, dict):
        raise MessageError("the message is not a JSON object.")
    match message.get("type"):
        case "offer":
            return _offer(message)
        case "settings":
            return _change(message)
        case "ping":
            if not _is_number(message.get("sent")):
                raise MessageError('ping: "sent" must be a number.', "ping")
            return Ping(message["sent"])
        case "stop":
            return Stop()
        case other:
            raise MessageError(f"unknown message type {str(other)[:40]!r} (supported: offer, settings, ping, stop).")


def _offer(message: dict[str, Any]) -> Offer:
    sdp, lines = message.get("sdp"), message.get("lines")
    if not isinstance(sdp, str) or not isinstance(lines, list) or not lines:
        raise MessageError('offer: "sdp" must be a text and "lines" a list of names.', "offer")
    if any(not isinstance(line, str) or line not in LINES for line in lines) or len(set(lines)) != len(lines):
        raise MessageError(f'offer: "lines" must be some of {", ".join(LINES)}, each once.', "offer")
    return Offer(sdp, tuple(lines))


def _change(message: dict[str, Any]) -> Change:
    settings = message.get("settings")
    if not isinstance(settings, dict) or not settings:
        raise MessageError('settings: "settings" must be an object with the values to change.', "settings")
    for name, value in settings.items():
        if name == "prompt" and isinstance(value, str):
            continue
        values = value if isinstance(value, list) else [value]
        if not all(_is_number(one) for one in values):
            raise MessageError(f"settings: {name[:40]!r} must be a number or a list of numbers.", "settings")
    return Change(settings)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
