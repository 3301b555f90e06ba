"""What a page may say, read with suspicion: anything else is answered with one sentence."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from redline.errors import RedlineError

# An offer of three video lines is about 6 kB.
LONGEST_MESSAGE_BYTES = 64 * 1024
LINES = ("camera", "output", "input")


class MessageError(RedlineError):
    """A message that a page should not have sent; `about` says what it wanted."""

    def __init__(self, text: str, about: str = "message") -> None:
        super().__init__(text)
        self.about = about


@dataclass(frozen=True)
class Offer:
    """A WebRTC offer; `lines` names its video lines in their order."""

    sdp: str = field(repr=False)
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    settings: dict[str, Any]


@dataclass(frozen=True)
class Ping:
    """`sent` is of the page's clock, and goes back as it came."""

    sent: float


@dataclass(frozen=True)
class Stop:
    """The page neither sends nor shows any longer."""


def read(text: str) -> Offer | Change | Ping | Stop:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError("a message is JSON, and this is not.") from error
    if not isinstance(said, dict):
        raise MessageError("a message is a JSON object with a type.")
    match said.get("type"):
        case "offer":
            return _offer(said)
        case "settings":
            return _change(said)
        case "ping":
            if not _is_number(said.get("sent")):
                raise MessageError("a ping says when it was sent.", "ping")
            return Ping(said["sent"])
        case "stop":
            return Stop()
        case other:
            raise MessageError(f"{str(other)[:40]!r} is no message: choose from offer, settings, ping, stop.")


def _offer(said: dict[str, Any]) -> Offer:
    sdp, lines = said.get("sdp"), said.get("lines")
    if not isinstance(sdp, str) or not isinstance(lines, list) or not lines:
        raise MessageError("an offer holds an SDP and the names of its lines.", "offer")
    if any(not isinstance(line, str) or line not in LINES for line in lines) or len(set(lines)) != len(lines):
        raise MessageError(f"the lines of an offer are some of {', '.join(LINES)}, each once.", "offer")
    return Offer(sdp, tuple(lines))


def _change(said: dict[str, Any]) -> Change:
    settings = said.get("settings")
    if not isinstance(settings, dict) or not settings:
        raise MessageError("a change of settings says which and to what.", "settings")
    for name, value in settings.items():
        if name == "prompt" and isinstance(value, str):
            continue
        values = value if isinstance(value, list) else [value]
        if not all(_is_number(one) for one in values):
            raise MessageError(f"{name[:40]!r} is set to numbers only.", "settings")
    return Change(settings)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
