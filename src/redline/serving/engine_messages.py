"""The messages between the server and the engine process: msgpack, each after four bytes with its length."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from redline.generation.request import EngineStats, Output, Request, TokenLogprobs

HEADER_BYTES = 4


class Start(Struct, frozen=True, tag=True):
    """The first message. `factory` (module:function) is the address of a function; see `engine_worker.Factory`."""

    factory: str
    options: dict[str, Any]


class Submit(Struct, frozen=True, tag=True):
    request: Request


class Score(Struct, frozen=True, tag=True):
    """Asks for the log-probabilities of given tokens, with the `top` most likely ones."""

    id: str
    prompts: list[list[int]]
    top: int


class DeleteSession(Struct, frozen=True, tag=True):
    """Deletes the stored state of a session of the API key with this salt."""

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
    """What the server needs to know of a loaded engine. `context` is None if the model has no limit."""

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
    """The outputs of all requests that gained tokens in one step. `stats` is sent a few times a second."""

    outputs: list[Output]
    stats: EngineStats | None = None


class Refused(Struct, frozen=True, tag=True):
    """The engine can never run this request."""

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
    """The engine could not be built, because of the model or an option."""

    message: str


ToEngine = Start | Submit | Abort | Embed | Score | DeleteSession
ToServer = Progress | Ready | Step | Refused | Embedded | Scored | SessionDeleted | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def pack(message: ToEngine | ToServer) -> bytes:
    """Returns a message with its length before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_bytes(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_for_server(body: bytes) -> ToServer:
    return _to_server.decode(body)


class EngineInbox:
    """Splits the received bytes into messages to the engine; incomplete messages wait for the rest."""

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
