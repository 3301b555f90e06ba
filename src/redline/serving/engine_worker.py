"""Runs in the engine process: builds an engine, takes requests from a socket, and sends the outputs of every step.

The server starts the process as `python -m redline.serving.engine_worker FD`, where FD is the file descriptor of the
socket. The process ends when the server closes the socket, so it never outlives the server.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from redline.errors import RedlineError
from redline.generation.request import EngineStats, Finish, Output, Request, TokenLogprobs
from redline.serving.engine_messages import (
    Abort,
    DeleteSession,
    Embed,
    Embedded,
    EngineInbox,
    EngineInfo,
    Failed,
    Progress,
    Ready,
    Refused,
    Score,
    Scored,
    SessionDeleted,
    Start,
    Step,
    Submit,
    ToEngine,
    ToServer,
    pack,
)

_RECEIVE_BYTES = 1 << 20
_STATS_EVERY_S = 0.1


class Engine(Protocol):
    """Describes the part of `redline.generation.engine.Engine` that serving needs."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> EngineStats: ...
    def embed(self, prompts: list[list[int]], pooling: str = "mean") -> list[list[float]]: ...
    def score(self, prompts: list[list[int]], top: int = 0) -> list[list[TokenLogprobs]]: ...
    def delete_session(self, salt: str, session: str) -> bool: ...
    def close(self) -> None: ...


# A function that builds an engine from keyword options. It also takes the keyword `progress`: a function that it calls
# with a text before each stage of its work.
Factory = Callable[..., tuple[Engine, EngineInfo]]


class _ServerClosed(Exception):
    """Is raised when the server has closed its end of the socket."""


class EngineWorker:
    """Runs an engine until the server closes the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._inbox = connection, EngineInbox()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._stats_sent_s = 0.0

    def run(self) -> int:
        """Builds and runs the engine, and returns the exit code of the process."""
        try:
            (start,) = self._receive(wait=True)
            assert isinstance(start, Start)
            engine = self._build(start)
            if engine is None:
                return 2
            try:
                self._serve(engine)
            finally:
                engine.close()
        except _ServerClosed:
            pass
        return 0

    def _build(self, start: Start) -> Engine | None:
        try:
            factory = resolve_factory(start.factory)
            engine, info = factory(**start.options, progress=lambda text: self._send(Progress(text)))
        except RedlineError as error:
            self._send(Failed(str(error)))
            return None
        self._send(Ready(info))
        return engine

    def _serve(self, engine: Engine) -> None:
        while True:
            for message in self._receive(wait=not engine.has_work):
                self._handle(engine, message)
            if engine.has_work:
                self._send_step(engine, engine.step())
            if not engine.has_work:
                # The server shows the last statistics that it received. Without this message, an idle engine
                # would be shown with the statistics of a busy one.
                self._send(Step([], engine.stats()))

    def _handle(self, engine: Engine, message: ToEngine) -> None:
        if isinstance(message, Start):
            return
        try:
            if isinstance(message, Submit):
                engine.submit(message.request)
            elif isinstance(message, Abort):
                engine.abort(message.id)
            elif isinstance(message, Embed):
                self._send(Embedded(message.id, engine.embed(message.prompts, message.pooling)))
            elif isinstance(message, Score):
                self._send(Scored(message.id, engine.score(message.prompts, message.top)))
            elif isinstance(message, DeleteSession):
                self._send(SessionDeleted(message.id, engine.delete_session(message.salt, message.session)))
        except RedlineError as error:
            self._send(Refused(message.request.id if isinstance(message, Submit) else message.id, str(error)))

    def _send_step(self, engine: Engine, outputs: list[Output]) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._stats_sent_s >= _STATS_EVERY_S
        shown = [output for output in outputs if output.finish is not Finish.ABORTED]
        if shown or is_due:
            self._send(Step(shown, engine.stats() if is_due else None))
        if is_due:
            self._stats_sent_s = now_s

    def _send(self, message: ToServer) -> None:
        try:
            self._connection.sendall(pack(message))
        except OSError as error:
            raise _ServerClosed from error

    def _receive(self, wait: bool) -> list[ToEngine]:
        """Returns the messages that have arrived. With `wait`, waits until there is at least one."""
        messages: list[ToEngine] = []
        while (wait and not messages) or self._poll.poll(0):
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise _ServerClosed from error
            if not data:
                raise _ServerClosed
            messages += self._inbox.feed(data)
        return messages


def resolve_factory(address: str) -> Factory:
    """Returns the function at an address such as package.module:function."""
    module, _, name = address.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RedlineError(f"the engine factory {address!r} cannot be imported: {error}.") from error


def main() -> None:
    # Ignores Ctrl-C (SIGINT), because the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = EngineWorker(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stderr.flush()
    # Exits without waiting for threads of libraries, which could delay the end of the process.
    os._exit(code)


if __name__ == "__main__":
    main()
