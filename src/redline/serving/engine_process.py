"""The server's side of the engine process: starts it, routes its outputs to requests, and restarts it after a crash.

A crash ends all running requests with an error, and requests are refused until the engine runs again, so no connection
hangs. An engine that is silent for too long while requests run is killed.
"""

import asyncio
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.generation.request import EngineStats, Finish, Output, Request
from redline.machine.processes import Child, last_line, start_module
from redline.serving.engine_messages import (
    HEADER_BYTES,
    Abort,
    Embed,
    Embedded,
    EngineInfo,
    Failed,
    Progress,
    Ready,
    Refused,
    Start,
    Step,
    Submit,
    ToEngine,
    ToServer,
    body_bytes,
    pack,
    read_for_server,
)
from redline.serving.errors import ApiError, engine_died, invalid, unavailable
from redline.serving.mailbox import Mailbox

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
# An engine that ran this long before it crashed is restarted without a longer delay.
_STABLE_S = 60.0
_PING_EVERY_S = 15.0
_END_S = 5.0
log = logging.getLogger("redline.serving")


class EngineState(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class EngineProcess:
    """Runs the engine that `factory` (module:function) builds from `options`, in a process of its own.

    All methods run in one event loop. `silence_s` is how long the engine may compute one step.
    """

    def __init__(
        self,
        factory: str,
        options: dict[str, Any],
        *,
        silence_s: float = 300.0,
        on_progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._start = Start(factory, options)
        self._silence_s, self._on_progress = silence_s, on_progress
        self.state = EngineState.LOADING
        self.info = EngineInfo()
        self.stats: EngineStats | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._embeddings: dict[str, asyncio.Future[list[list[float]]]] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._heard_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._first_result: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Starts the engine and waits until it is ready. Raises RedlineError if it cannot be built."""
        self._first_result = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]
        await self._first_result

    async def close(self) -> None:
        """Ends the engine process, and all requests with an error."""
        self.state = EngineState.CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(unavailable("The server is shutting down.", "shutting_down"))

    def check_ready(self) -> None:
        """Raises an ApiError with the status 503 unless a request can run now."""
        if self.state is EngineState.LOADING:
            raise unavailable("The model is being loaded.", "loading", 5)
        if self.state is not EngineState.READY:
            raise unavailable("The engine is being restarted after a crash.", "engine_restarting", 5)

    def submit(self, requests: list[Request]) -> Mailbox:
        """Starts requests whose outputs arrive in one mailbox. The caller calls `release` when it has taken them."""
        self.check_ready()
        mailbox = Mailbox(tuple(request.id for request in requests))
        for request in requests:
            self._mailboxes[request.id] = mailbox
            self._send(Submit(request))
        return mailbox

    def end(self, request_id: str) -> None:
        """Aborts a request unless it has ended; its further outputs are ignored."""
        if self._mailboxes.pop(request_id, None) is not None and self._writer is not None:
            self._send(Abort(request_id))

    def release(self, mailbox: Mailbox) -> None:
        """Aborts all requests of a mailbox that have not ended."""
        for request_id in mailbox.ids:
            self.end(request_id)

    async def embed(self, prompts: list[list[int]], pooling: str) -> list[list[float]]:
        """Returns an embedding of each prompt, which the engine computes between two steps."""
        self.check_ready()
        request_id = f"embed-{next(self._numbers)}"
        future = self._embeddings[request_id] = asyncio.get_running_loop().create_future()
        self._send(Embed(request_id, prompts, pooling))
        try:
            return await future
        finally:
            self._embeddings.pop(request_id, None)

    @property
    def requests(self) -> int:
        return len(self._mailboxes) + len(self._embeddings)

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        if not self.requests:
            self._heard_s = self._now_s()
        self._writer.write(pack(message))

    async def _supervise(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            begun_s = self._now_s()
            try:
                await self._run_once()
            except RedlineError as error:
                if self._first_result is not None and not self._first_result.done():
                    self.state = EngineState.CLOSED
                    self._first_result.set_exception(error)
                    return
                log.error("the engine ended: %s Restarting it in %.1f s.", error, delay_s)
            self.state, self._writer = EngineState.RESTARTING, None
            self.fail_all(engine_died())
            self.restarts += 1
            if self._now_s() - begun_s > _STABLE_S:
                delay_s = _FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _run_once(self) -> None:
        """Runs one engine process to its end; always raises."""
        paths = os.pathsep.join(path for path in sys.path if path)
        with tempfile.NamedTemporaryFile(prefix="redline-engine-", suffix=".log") as file:
            connection, process = start_module(
                "redline.serving.engine_worker", environment={**os.environ, "PYTHONPATH": paths}, stderr=file.file
            )
            # `Child` only ends the process and explains its end: messages go through the event loop.
            child = Child("the engine process", connection, process, Path(file.name))  # pyrefly: ignore
            self.pid = process.pid
            code: int | None = None
            try:
                reader, self._writer = await asyncio.open_connection(sock=connection, limit=1 << 22)
                self._send(self._start)
                while True:
                    body = await reader.readexactly(body_bytes(await reader.readexactly(HEADER_BYTES)))
                    self._receive(read_for_server(body))
            except (asyncio.IncompleteReadError, ConnectionError):
                code = await self._end(child)
                self._log_tail(Path(file.name))
                raise RedlineError(f"{child.describe_exit(code)}.") from None
            finally:
                if code is None:
                    await asyncio.shield(self._end(child))

    async def _end(self, child: Child) -> int | None:
        """Closes the connection, which ends the process, and returns its exit code."""
        if self._writer is not None:
            # The event loop must forget the socket before `child` closes it.
            self._writer.transport.abort()
            self._writer = None
        return await asyncio.to_thread(child.stop, _END_S)

    def _receive(self, message: ToServer) -> None:
        self._heard_s = self._now_s()
        if isinstance(message, Step):
            self.stats = message.stats or self.stats
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Embedded):
            if (future := self._embeddings.get(message.id)) is not None and not future.done():
                future.set_result(message.vectors)
        elif isinstance(message, Progress):
            self._on_progress(message.text)
        elif isinstance(message, Failed):
            raise RedlineError(message.message)
        elif isinstance(message, Ready):
            self.info, self.state = message.info, EngineState.READY
            if self._first_result is not None and not self._first_result.done():
                self._first_result.set_result(None)

    def _deliver(self, output: Output) -> None:
        mailbox = self._mailboxes.get(output.id)
        if mailbox is None:
            return
        if output.finish is not None:
            del self._mailboxes[output.id]
        if output.finish is Finish.ERROR:
            mailbox.fail(ApiError(500, output.error or "The engine failed.", kind="server_error", code="engine_error"))
        else:
            mailbox.put(output)

    def _refuse(self, refused: Refused) -> None:
        error = invalid(refused.message)
        if (mailbox := self._mailboxes.pop(refused.id, None)) is not None:
            mailbox.fail(error)
        if (future := self._embeddings.get(refused.id)) is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(error)
        for future in self._embeddings.values():
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        """Wakes silent streams, and kills an engine that does not answer."""
        pinged_s = self._now_s()
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now_s = self._now_s()
            if now_s - pinged_s >= _PING_EVERY_S:
                pinged_s = now_s
                for mailbox in set(self._mailboxes.values()):
                    mailbox.ping()
            is_stuck = self.requests and now_s - self._heard_s > self._silence_s
            if is_stuck and self.state is EngineState.READY and self.pid is not None:
                log.error("the engine has not answered for %.0f s and is killed", self._silence_s)
                os.killpg(self.pid, 9)
                self._heard_s = now_s

    @staticmethod
    def _log_tail(path: Path) -> None:
        if last_line(path):
            lines = path.read_text(errors="replace").splitlines()[-20:]
            log.error("the last lines of the engine's log:\n%s", "\n".join(lines))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
