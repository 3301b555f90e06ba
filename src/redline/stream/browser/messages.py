"""Parses the messages of a page, which are untrusted input: an invalid message raises MessageError."""

from typing import Literal

import msgspec
from msgspec import Struct

from redline.errors import RedlineError

# Longer messages are refused; for comparison, an offer of three video tracks has about 6 kB.
LONGEST_MESSAGE_BYTES = 64 * 1024
_LONGEST_REASON = 100


class MessageError(RedlineError):
    """Raised for an invalid message; `about` is the type of that message."""

    def __init__(self, text: str, about: str = "message") -> None:
        super().__init__(text)
        self.about = about


class Offer(Struct, frozen=True, tag="offer"):
    """A WebRTC offer; `lines` names its video tracks in order."""

    sdp: str
    lines: tuple[Literal["camera", "output", "input"], ...]


class Change(Struct, frozen=True, tag="settings"):
    settings: dict[str, int | float | str | list[float]]


class Ping(Struct, frozen=True, tag="ping"):
    """Asks for an answer at once. `sent` is a time by the page's clock, and is sent back unchanged."""

    sent: float


class Stop(Struct, frozen=True, tag="stop"):
    """Asks to close the WebRTC connection."""


Message = Offer | Change | Ping | Stop
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def read(text: str) -> Message:
    try:
        message = _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageError(f"the message is invalid: {str(error)[:_LONGEST_REASON]}.") from error
    if isinstance(message, Offer) and (not message.lines or len(set(message.lines)) != len(message.lines)):
        raise MessageError('offer: "lines" must name at least one video track, and none twice.', "offer")
    if isinstance(message, Change):
        if not message.settings:
            raise MessageError('settings: "settings" must not be empty.', "settings")
        for name, value in message.settings.items():
            if isinstance(value, str) != (name == "prompt"):
                kind = "a string" if name == "prompt" else "a number or a list of numbers"
                raise MessageError(f"settings: {name[:40]!r} must be {kind}.", "settings")
    return message
