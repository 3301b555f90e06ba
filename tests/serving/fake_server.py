"""An OpenAI-compatible server with scripted answers and exact delays."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Answer:
    """What happens to one request: an error status, or chunks of text, `first_s` and then `gap_s` apart.

    `cut` ends the connection in the middle, `error` is sent as an error event after the chunks.
    """

    chunks: tuple[str, ...] = ("Hello", " there")
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: bool = True
    prompt_tokens: int = 7
    cached_tokens: int = 0
    tokens_per_chunk: int = 1
    cut: bool = False
    error: str = ""
    finish: str = "stop"


@dataclass
class FakeServer:
    """`answer` maps the body of a request to its answer; `seen` has the bodies, and `headers` those of each."""

    answer: Callable[[dict[str, Any]], Answer] = lambda _: Answer()
    models: tuple[str, ...] = ("tiny",)
    key: str | None = None
    metrics: Callable[[], str] = lambda: ""
    files: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)
    file_headers: Mapping[str, str] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    disconnects: int = 0
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeServer"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/metrics", self._show_metrics)
        for path in self.files:
            app.router.add_get(path, self._file)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    @contextmanager
    def in_thread(self) -> Iterator["FakeServer"]:
        """Runs the server in a thread, for clients that block."""
        ready, loop = threading.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            async with self.running():
                ready.set()
                await stop.wait()

        def run() -> None:
            try:
                loop.run_until_complete(serve())
            finally:
                loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        ready.wait(30)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()

    async def _file(self, request: web.Request) -> web.Response:
        body, kind = self.files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=dict(self.file_headers))

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return error_response(401, "the API key is missing or wrong.")

    async def _list_models(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        return self._refusal(request) or web.json_response(listed)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return self._refusal(request) or web.Response(text=self.metrics())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.seen.append(body)
        self.headers.append(request.headers)
        answer = self.answer(body)
        if answer.status != 200:
            return error_response(answer.status, answer.message, answer.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(request, response, answer)
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnects += 1
            raise
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, answer: Answer) -> None:
        is_chat = request.path.endswith("chat/completions")

        async def say(choices: list[Any], **more: object) -> None:
            text = json.dumps({"id": "1", "object": "chunk", "model": "tiny", "choices": choices, **more})
            await response.write(f"data: {text}\n\n".encode())

        def choice(text: str | None, finish: str | None = None) -> list[Any]:
            content = {"delta": {} if text is None else {"content": text}} if is_chat else {"text": text or ""}
            return [{"index": 0, "finish_reason": finish} | content]

        if is_chat:
            await say([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        await response.write(b": a comment keeps proxies awake\n\n")
        for number, text in enumerate(answer.chunks):
            await asyncio.sleep(answer.gap_s if number else answer.first_s)
            await say(choice(text))
        if answer.error:
            text = json.dumps({"error": {"message": answer.error, "type": "server_error"}})
            await response.write(f"event: error\ndata: {text}\n\n".encode())
            return
        if answer.cut:
            # A connection that is aborted loses what its client has not read yet.
            await asyncio.sleep(answer.gap_s)
            assert request.transport is not None
            request.transport.abort()
            return
        await say(choice(None, answer.finish))
        if answer.usage:
            usage = {"prompt_tokens": answer.prompt_tokens, "total_tokens": 0}
            usage["completion_tokens"] = answer.tokens_per_chunk * len(answer.chunks)
            details = {"prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
            await say([], usage=usage | details)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status, headers=dict(headers or {}))
