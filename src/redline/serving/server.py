"""Runs the web server in a thread and the engine in a process, and shuts both down."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.serving.engine_process import EngineProcess
from redline.serving.errors import unavailable
from redline.serving.keys import Keys
from redline.serving.limits import Limits
from redline.serving.router import new_app
from redline.serving.served_model import ServedModel
from redline.serving.services import Services
from redline.serving.supervised_process import SupervisedProcess
from redline.serving.upstream_process import Command, UpstreamProcess
from redline.web.acceptor import ConnectionLimits
from redline.web.access import is_loopback, listen, urls
from redline.web.server import WebServer

Progress = Callable[[str], object]
_BACKLOG = 1024
# The interval at which draining checks whether the last request has ended.
_LOOK_S = 0.05


@dataclass(frozen=True)
class EngineSource:
    """Describes how the engine process builds its engine: it calls `factory` with `options`.

    `factory` is the address of an importable function (module:function). The process is restarted if one step takes
    longer than `silence_s`.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    silence_s: float = 300.0

    def process(self, on_progress: Progress) -> SupervisedProcess:
        return EngineProcess(self.factory, self.options, silence_s=self.silence_s, on_progress=on_progress)


@dataclass(frozen=True)
class UpstreamSource:
    """Describes another server that generates the texts.

    `command` returns the command line that starts the other server on a given port with a given API key.
    """

    name: str
    command: Command

    def process(self, on_progress: Progress) -> SupervisedProcess:
        return UpstreamProcess(self.name, self.command, on_progress=on_progress)


class Server:
    """Serves a model at the address `url` until `close` is called. It is also a context manager.

    The web server runs in a thread, and the engine in a process of its own.
    """

    def __init__(
        self,
        model: str | Path,
        engine: EngineSource | UpstreamSource,
        *,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        keys: Keys | None = None,
        limits: Limits | None = None,
        on_progress: Progress = lambda text: None,
    ) -> None:
        self._keys, self.limits = keys or Keys(), limits or Limits()
        if not self._keys.callers and not is_loopback(host):
            raise RedlineError(
                f"{host!r} can be reached from other machines: give an --api-key, --api-keys FILE or "
                "REDLINE_API_KEYS, or use 127.0.0.1."
            )
        self._model = ServedModel.open(model, name)
        self._engine = engine.process(on_progress)
        self.services = Services(self._model, self._engine, self._keys, self.limits)
        self._listener = listen(host, port, _BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self.urls = urls("http", host, self.port, "", None)
        app = new_app(self.services, host, lambda request: self._web.release(request))
        # At most half of the connections may be pending, so that connections without a request cannot use up the limit.
        pending = max(1, self.limits.connections // 2)
        limits_of_connections = ConnectionLimits(pending, pending, self.limits.request_s, self.limits.connections)
        self._web = WebServer(
            app,
            self._listener,
            self._work,
            limits=limits_of_connections,
            keep_alive_s=self.limits.keep_alive_s,
            handler_cancellation=True,
            auto_decompress=False,
            lingering_time=1.0,
        )
        self._ready, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._drain: asyncio.Event | None = None
        self._is_drain_over = self._is_started = False

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def engine_pid(self) -> int | None:
        """The process ID of the engine process."""
        return self._engine.pid

    def start(self) -> "Server":
        """Starts the server if it is not running yet, and waits until the model is loaded.

        While the model is being loaded, /health answers 503.
        """
        if self._is_started:
            return self
        self._is_started = True
        self._web.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if self._error is not None:
            self.close()
            raise self._error
        return self

    def drain(self) -> None:
        """Refuses new requests, waits up to `limits.drain_s` seconds for running ones, and then closes the server.

        The call itself does not wait. A second call ends the running requests immediately. May be called from a signal
        handler.
        """
        loop = self._web.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._begin_drain)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the server has ended or the timeout has passed. Returns whether the server has ended."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Ends running requests with an error, and stops the server. May be called repeatedly."""
        self._web.close()
        self._model.close()
        self._ended.set()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _work(self) -> None:
        self._drain = asyncio.Event()
        try:
            starting = asyncio.create_task(self._engine.start())
            stopping = asyncio.create_task(self._web.stop.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                raise RedlineError("the server was closed while the model was being loaded.")
            await starting
            info = self._engine.info
            self._model.set_plan(info.plan, info.context)
            self._ready.set()
            draining = asyncio.create_task(self._drain.wait())
            await asyncio.wait((stopping, draining), return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await self._wait_for_requests()
        except RedlineError as error:
            self._error = error
        finally:
            await self._engine.close()
            # Gives the handlers up to one second to send their last events before the connections are closed.
            deadline_s = asyncio.get_running_loop().time() + 1.0
            while self.services.admission.running and asyncio.get_running_loop().time() < deadline_s:
                await asyncio.sleep(_LOOK_S)
            self._ready.set()
            self._ended.set()

    def _begin_drain(self) -> None:
        self._is_drain_over = self.services.draining
        self.services.draining = True
        if self._drain is not None:
            self._drain.set()
        if self._is_drain_over:
            self._engine.fail_all(unavailable("The server is shutting down.", "shutting_down"))

    async def _wait_for_requests(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.limits.drain_s
        while self.services.admission.running and loop.time() < deadline_s and not self._is_drain_over:
            if self._web.stop.is_set():
                return
            await asyncio.sleep(_LOOK_S)
