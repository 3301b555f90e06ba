"""Starts and watches a process that the server needs, and restarts it after a crash with growing delays."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from enum import Enum
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.generation.request import EngineStats
from redline.machine.processes import last_line
from redline.serving.engine_messages import EngineInfo
from redline.serving.errors import ApiError, engine_died, unavailable

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
# If a process ran longer than this before it crashed, the delay before its restart is the first delay again.
_STABLE_S = 60.0
_LOG_LINES = 20
log = logging.getLogger("redline.serving")


class ProcessState(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class SupervisedProcess(ABC):
    """Keeps one process running. All methods run in one event loop.

    After a crash, all running requests end with an error, and new ones are refused until the process is ready again.
    So no client waits for a process that has crashed.
    """

    def __init__(self, on_progress: Callable[[str], object]) -> None:
        self._on_progress = on_progress
        self.state = ProcessState.LOADING
        self.info = EngineInfo()
        self.stats: EngineStats | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._first_result: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def requests(self) -> int:
        """The number of running requests."""

    @abstractmethod
    def fail_all(self, error: ApiError) -> None:
        """Ends all running requests with an error."""

    @abstractmethod
    async def _run_once(self) -> None:
        """Runs one process until it ends, and then raises an error. Calls `_is_ready` when the process is ready."""

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        """Returns further coroutines, which run until `close` is called."""
        return []

    async def start(self) -> None:
        """Starts the process, and waits until it is ready. Raises RedlineError if the process ends before that."""
        self._first_result = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(work) for work in (self._supervise(), *self._background())]
        await self._first_result

    async def close(self) -> None:
        """Stops the process, and ends all running requests with an error."""
        self.state = ProcessState.CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(unavailable("The server is shutting down.", "shutting_down"))

    def check_ready(self) -> None:
        """Raises an ApiError with the status 503 unless a request can run now."""
        if self.state is ProcessState.LOADING:
            raise unavailable("The model is being loaded.", "loading", 5)
        if self.state is not ProcessState.READY:
            raise unavailable("The engine is being restarted after a crash.", "engine_restarting", 5)

    def _is_ready(self, info: EngineInfo) -> None:
        self.info, self.state = info, ProcessState.READY
        if self._first_result is not None and not self._first_result.done():
            self._first_result.set_result(None)

    def _has_ended(self) -> None:
        """Ends the running requests with an error, and refuses new ones until the process is ready again."""
        if self.state is not ProcessState.CLOSED:
            self.state = ProcessState.RESTARTING
            self.fail_all(engine_died())

    async def _supervise(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            begun_s = self._now_s()
            try:
                await self._run_once()
            except RedlineError as error:
                if self._first_result is not None and not self._first_result.done():
                    self.state = ProcessState.CLOSED
                    self._first_result.set_exception(error)
                    return
                log.error("the engine ended: %s Restarting it in %.1f s.", error, delay_s)
            self._has_ended()
            self.restarts += 1
            if self._now_s() - begun_s > _STABLE_S:
                delay_s = _FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    @staticmethod
    def _log_tail(path: Path) -> None:
        """Logs the last lines of the file to which the process wrote its output."""
        if last_line(path):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            log.error("the last lines of the engine's log:\n%s", "\n".join(lines))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
