"""Runs the engine process: sends requests to it, and passes its outputs to the handlers of these requests.

An engine that sends nothing for too long while requests run is killed and restarted.
"""

import asyncio
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.generation.request import Finish, Output, Request, TokenLogprobs
from redline.machine.processes import Child, start_module
from redline.serving.engine_messages import (
    HEADER_BYTES,
    Abort,
    DeleteSession,
    Embed,
    Embedded,
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
    body_bytes,
    pack,
    read_for_server,
)
from redline.serving.errors import ApiError, invalid
from redline.serving.mailbox import Mailbox
from redline.serving.supervised_process import ProcessState, SupervisedProcess

_PING_EVERY_S = 15.0
_END_S = 5.0
log = logging.getLogger("redline.serving")


class EngineProcess(SupervisedProcess):
    """Runs the engine that `factory` (module:function) builds from `options`, in a process of its own.

    All methods run in one event loop. The engine is killed if it sends nothing for `silence_s` seconds while requests
    run, so one step may not take longer.
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
        super().__init__(on_progress)
        self._silence_s = silence_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._heard_s = 0.0

    def submit(self, requests: list[Request]) -> Mailbox:
        """Sends requests to the engine, and returns the mailbox that receives the outputs of all of them.

        The caller must call `release` when it has taken the outputs, or does not need them any more.
        """
        self._expect_answers()
        has_grammar = any(request.grammar is not None for request in requests)
        mailbox = Mailbox(tuple(request.id for request in requests), has_grammar)
        for request in requests:
            self._mailboxes[request.id] = mailbox
            self._send(Submit(request))
        return mailbox

    def end(self, request_id: str) -> None:
        """Aborts a request unless it has ended. Further outputs of the request are ignored."""
        if self._mailboxes.pop(request_id, None) is not None and self._writer is not None:
            self._send(Abort(request_id))

    def release(self, mailbox: Mailbox) -> None:
        """Aborts all requests of a mailbox that have not ended."""
        for request_id in mailbox.ids:
            self.end(request_id)

    async def embed(self, prompts: list[list[int]], pooling: str) -> list[list[float]]:
        """Returns an embedding of each prompt. The engine computes them between two steps."""
        return await self._call(lambda request_id: Embed(request_id, prompts, pooling))

    async def score(self, prompts: list[list[int]], top: int) -> list[list[TokenLogprobs]]:
        """Returns the log-probabilities of all tokens of each prompt except its first token.

        Each entry also contains the `top` most likely tokens at this position.
        """
        return await self._call(lambda request_id: Score(request_id, prompts, top))

    async def delete_session(self, salt: str, session: str) -> bool:
        """Deletes a stored session, and returns whether there was one."""
        return await self._call(lambda request_id: DeleteSession(request_id, salt, session))

    async def _call(self, message: Callable[[str], ToEngine]) -> Any:
        """Sends a message with a new id, and returns the result that comes back with this id."""
        self._expect_answers()
        request_id = f"call-{next(self._numbers)}"
        future = self._calls[request_id] = asyncio.get_running_loop().create_future()
        self._send(message(request_id))
        try:
            return await future
        finally:
            self._calls.pop(request_id, None)

    @property
    def requests(self) -> int:
        return len(self._mailboxes) + len(self._calls)

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        self._writer.write(pack(message))

    def _expect_answers(self) -> None:
        """Raises an ApiError unless the engine is ready. Restarts the time of its silence if no requests run yet."""
        self.check_ready()
        if not self.requests:
            self._heard_s = self._now_s()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch()]

    async def _run_once(self) -> None:
        """Runs one engine process until it ends, and then raises an error; never returns."""
        paths = os.pathsep.join(path for path in sys.path if path)
        with tempfile.NamedTemporaryFile(prefix="redline-engine-", suffix=".log") as file:
            connection, process = start_module(
                "redline.serving.engine_worker", environment={**os.environ, "PYTHONPATH": paths}, stderr=file.file
            )
            # `Child` is used only to stop the process and to describe its exit code; the event loop handles messages.
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
                self._has_ended()
                code = await self._end(child)
                self._log_tail(Path(file.name))
                raise RedlineError(f"{child.describe_exit(code)}.") from None
            finally:
                if code is None:
                    await asyncio.shield(self._end(child))

    async def _end(self, child: Child) -> int | None:
        """Closes the connection, which ends the process, and returns its exit code."""
        if self._writer is not None:
            # The event loop must release the socket before `child.stop` closes it.
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
            self._return(message.id, message.vectors)
        elif isinstance(message, Scored):
            self._return(message.id, message.logprobs)
        elif isinstance(message, SessionDeleted):
            self._return(message.id, message.existed)
        elif isinstance(message, Progress):
            self._on_progress(message.text)
        elif isinstance(message, Failed):
            raise RedlineError(message.message)
        elif isinstance(message, Ready):
            self._is_ready(message.info)

    def _deliver(self, output: Output) -> None:
        mailbox = self._mailboxes.get(output.id)
        if mailbox is None:
            return
        if output.finish is not None:
            del self._mailboxes[output.id]
        if output.finish is Finish.ERROR:
            error = ApiError(500, output.error or "The engine failed.", kind="server_error", code="engine_error")
            mailbox.fail(invalid(output.error, code="invalid_grammar") if mailbox.has_grammar else error)
        else:
            mailbox.put(output)

    def _return(self, request_id: str, result: object) -> None:
        if (future := self._calls.get(request_id)) is not None and not future.done():
            future.set_result(result)

    def _refuse(self, refused: Refused) -> None:
        error = invalid(refused.message)
        if (mailbox := self._mailboxes.pop(refused.id, None)) is not None:
            mailbox.fail(error)
        if (future := self._calls.get(refused.id)) is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        """Pings the mailboxes regularly, so that silent streams stay open, and kills an engine that does not answer."""
        pinged_s = self._now_s()
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4, _PING_EVERY_S / 4))
            now_s = self._now_s()
            if now_s - pinged_s >= _PING_EVERY_S:
                pinged_s = now_s
                for mailbox in set(self._mailboxes.values()):
                    mailbox.ping()
            is_stuck = self.requests and now_s - self._heard_s > self._silence_s
            if is_stuck and self.state is ProcessState.READY and self.pid is not None:
                log.error("the engine has not answered for %.0f s and is killed", self._silence_s)
                os.killpg(self.pid, 9)
                self._heard_s = now_s
