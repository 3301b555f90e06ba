"""Runs another OpenAI-compatible server, such as vLLM's, as a child process that generates the texts.

The other server listens on a free port of the loopback address and requires a key that only this process knows.
Therefore clients cannot bypass the limits, keys and metrics of this server.
"""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import aiohttp

from redline.errors import RedlineError
from redline.machine.processes import Child
from redline.serving.engine_messages import EngineInfo
from redline.serving.errors import ApiError
from redline.serving.supervised_process import SupervisedProcess

_POLL_S = 0.2
_LOOK_EVERY_S, _HEALTH_S, _MOST_FAILURES = 2.0, 10.0, 3
_END_S = 10.0
# A function that receives the port and the key of the other server, and returns its command line and the environment
# variables to add.
Command = Callable[[int, str], tuple[list[str], dict[str, str]]]


def vllm_command(folder: Path, name: str, python: str | None, arguments: tuple[str, ...]) -> Command:
    """Returns a `Command` that starts vLLM's server for a model folder; `python` is the interpreter that has vLLM."""

    def command(port: int, key: str) -> tuple[list[str], dict[str, str]]:
        words = [python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        words += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *arguments]
        return words, {"VLLM_API_KEY": key, "HF_HUB_OFFLINE": "1"}

    return command


class UpstreamProcess(SupervisedProcess):
    """Runs the server that `command` describes, and forwards requests to it."""

    def __init__(
        self, name: str, command: Command, *, on_progress: Callable[[str], object] = lambda text: None
    ) -> None:
        super().__init__(on_progress)
        self._name, self._command = name, command
        self._url = ""
        self._session: aiohttp.ClientSession | None = None
        self._answers: set[asyncio.Future[None]] = set()

    @property
    def requests(self) -> int:
        return len(self._answers)

    def fail_all(self, error: ApiError) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)

    def open_answer(self) -> asyncio.Future[None]:
        """Registers a running request, and returns a future that gets an exception if the request must end early.

        The caller must pass the future to `close_answer` when the request has ended.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        return answer

    def close_answer(self, answer: asyncio.Future[None]) -> None:
        self._answers.discard(answer)
        answer.cancel()

    def post(self, path: str, body: bytes) -> "aiohttp.client._RequestContextManager":
        """Sends a request. Returns an async context manager that yields the response."""
        self.check_ready()
        assert self._session is not None
        return self._session.post(f"{self._url}{path}", data=body, headers={"Content-Type": "application/json"})

    async def _run_once(self) -> None:
        port, key = _free_port(), secrets.token_urlsafe(32)
        words, variables = self._command(port, key)
        self._url = f"http://127.0.0.1:{port}"
        with tempfile.NamedTemporaryFile(prefix="redline-upstream-", suffix=".log") as file:
            child = self._start_child(words, variables, file.file, Path(file.name))
            try:
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
                headers = {"Authorization": f"Bearer {key}"}
                async with aiohttp.ClientSession(headers=headers, timeout=timeout) as self._session:
                    if await self._answers_before_its_end(child):
                        self._is_ready(EngineInfo(plan=self._name))
                        await self._watch(child)
                self._has_ended()
                code = child.process.poll() if child.process is not None else None
                self._log_tail(Path(file.name))
                if code is None:
                    raise RedlineError(f"{self._name} is not healthy any more.")
                raise RedlineError(f"{child.describe_exit(code)}.")
            finally:
                self._session = None
                child.terminate()
                await asyncio.shield(asyncio.to_thread(child.stop, _END_S))

    def _start_child(self, words: list[str], variables: dict[str, str], log: IO[bytes], path: Path) -> Child:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    words,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise RedlineError(f"{self._name} cannot be started: {words[0]}: {error.strerror}.") from error
        self.pid = process.pid
        # `Child` is used only to stop the process and to describe its exit code. It requires a socket, which is unused.
        return Child(self._name, ours, process, path)  # pyrefly: ignore

    async def _answers_before_its_end(self, child: Child) -> bool:
        assert child.process is not None
        while child.process.poll() is None:
            if await self._is_healthy():
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _watch(self, child: Child) -> None:
        """Returns when the process has ended or is not healthy any more.

        Watching only the process is not enough, because vLLM's server can outlive its engine.
        """
        assert child.process is not None
        looked_s, failures = self._now_s(), 0
        while child.process.poll() is None and failures < _MOST_FAILURES:
            await asyncio.sleep(_POLL_S)
            if self._now_s() - looked_s >= _LOOK_EVERY_S:
                failures = 0 if await self._is_healthy() else failures + 1
                looked_s = self._now_s()

    async def _is_healthy(self) -> bool:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(f"{self._url}/health", timeout=timeout) as response:
                return response.status == 200
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
