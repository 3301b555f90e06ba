"""Defines the messages between the server and the engine process.

Each message is encoded as msgpack, and is preceded by four bytes that contain its length.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from redline.generation.request import EngineStats, Output, Request, TokenLogprobs

HEADER_BYTES = 4


class Start(Struct, frozen=True, tag=True):
    """Is the first message to the engine process: builds the engine from `options`.

    `factory` is the address (module:function) of the function that builds it; see `engine_worker.Factory`.
    """

    factory: str
    options: dict[str, Any]


class Submit(Struct, frozen=True, tag=True):
    request: Request


class Score(Struct, frozen=True, tag=True):
    """Asks for the log-probabilities of the tokens of prompts, and of the `top` most likely tokens at each position."""

    id: str
    prompts: list[list[int]]
    top: int


class DeleteSession(Struct, frozen=True, tag=True):
    """Deletes the stored state of a session. `salt` identifies the API key that the session belongs to."""

    id: str
    salt: str
    session: str


class Abort(Struct, frozen=True, tag=True):
    id: str


class Embed(Struct, frozen=True, tag=True):
    id: str
    prompts: list[list[int]]
    pooling: str


class EngineInfo(Struct, frozen=True):
    """Describes a loaded engine. `context` is the largest number of tokens of a text, or None if there is no limit."""

    context: int | None = None
    vocabulary: int | None = None
    plan: str = ""
    device: str = ""
    setup_s: float = 0.0


class Progress(Struct, frozen=True, tag=True):
    text: str


class Ready(Struct, frozen=True, tag=True):
    info: EngineInfo


class Step(Struct, frozen=True, tag=True):
    """Contains the outputs of all requests that got new tokens in one step.

    `stats` is None in most messages, because a busy engine sends it only about ten times a second.
    """

    outputs: list[Output]
    stats: EngineStats | None = None


class Refused(Struct, frozen=True, tag=True):
    """Says that the engine can never run the request `id`, and why."""

    id: str
    message: str


class Embedded(Struct, frozen=True, tag=True):
    id: str
    vectors: list[list[float]]


class Scored(Struct, frozen=True, tag=True):
    id: str
    logprobs: list[list[TokenLogprobs]]


class SessionDeleted(Struct, frozen=True, tag=True):
    id: str
    existed: bool


class Failed(Struct, frozen=True, tag=True):
    """Says that the engine could not be built because of the model or an option."""

    message: str


ToEngine = Start | Submit | Abort | Embed | Score | DeleteSession
ToServer = Progress | Ready | Step | Refused | Embedded | Scored | SessionDeleted | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def pack(message: ToEngine | ToServer) -> bytes:
    """Returns the encoded message, preceded by its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_bytes(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_for_server(body: bytes) -> ToServer:
    return _to_server.decode(body)


class EngineInbox:
    """Splits received bytes into messages to the engine. Keeps an incomplete message until the rest of it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ToEngine]:
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + body_bytes(bytes(self._buffer[:HEADER_BYTES]))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield _to_engine.decode(body)
