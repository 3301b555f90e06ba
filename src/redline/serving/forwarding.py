"""Forwards requests to another server, such as vLLM's, and passes on its answers.

API keys, limits and metrics work as with Redline's own engine. Events of a stream are passed on as they arrive.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from redline.serving.admission import Ticket
from redline.serving.errors import ApiError, engine_died, invalid
from redline.serving.services import CALL, SERVICES, Services
from redline.serving.sse import EventStream
from redline.serving.upstream_process import UpstreamProcess

_PING_S = 15.0
# The number of prompt tokens is estimated from the size of the body, because only the other server applies the chat
# template and processes images.
_BYTES_PER_TOKEN = 4


async def forward(request: web.Request) -> web.StreamResponse:
    """Forwards a request to the same path of the other server."""
    services = request.app[SERVICES]
    body = services.reader.read_object(request[CALL].body)
    model = body.get("model")
    services.model.check_name(model if isinstance(model, str) else None)
    count = body.get("n", 1)
    if not isinstance(count, int) or not 1 <= count <= services.limits.choices:
        raise invalid(f"n must be from 1 to {services.limits.choices}, not {count}.", "n")
    ticket = services.admit(request[CALL].caller, count)
    try:
        ticket.queue(len(request[CALL].body) // _BYTES_PER_TOKEN)
        return await _Forwarded(services, ticket, request, {"model": services.model.name, **body}).answer()
    finally:
        ticket.close()


class _Forwarded:
    """Forwards one request, and measures its latencies."""

    def __init__(self, services: Services, ticket: Ticket, request: web.Request, body: dict[str, Any]) -> None:
        assert isinstance(services.backend, UpstreamProcess)
        self._services, self._ticket, self._request, self._body = services, ticket, request, body
        self._upstream = services.backend
        self._begun_s = time.perf_counter()
        self._last_s: float | None = None

    async def answer(self) -> web.StreamResponse:
        ended = self._upstream.open_answer()
        stream = EventStream(self._request, self._services.limits.stall_s)
        try:
            async with self._upstream.post(self._request.path, msgspec.json.encode(self._body)) as response:
                if response.content_type != "text/event-stream":
                    return await self._whole(response, ended)
                async for data in self._events(response, ended):
                    await stream.send_bytes(data)
                await stream.end()
        except aiohttp.ClientError:
            return await self._failed(stream, engine_died())
        except ApiError as error:
            return await self._failed(stream, error)
        finally:
            self._upstream.close_answer(ended)
        self._services.metrics.end_to_end_s.observe(time.perf_counter() - self._begun_s)
        return stream.response

    async def _whole(self, response: aiohttp.ClientResponse, ended: asyncio.Future[None]) -> web.Response:
        reading = asyncio.ensure_future(response.read())
        await _first_of(reading, ended, None)
        self._measure()
        self._services.metrics.end_to_end_s.observe(time.perf_counter() - self._begun_s)
        return web.Response(body=reading.result(), status=response.status, content_type=response.content_type)

    async def _events(self, response: aiohttp.ClientResponse, ended: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yields the bytes of the events as they arrive, and a comment after every `_PING_S` seconds without data."""
        while True:
            reading = asyncio.ensure_future(response.content.readany())
            try:
                while not await _first_of(reading, ended, _PING_S):
                    yield b": keep-alive\n\n"
            finally:
                reading.cancel()
            data = reading.result()
            if not data:
                return
            self._measure()
            yield data

    def _measure(self) -> None:
        now_s, metrics = time.perf_counter(), self._services.metrics
        if self._last_s is None:
            self._ticket.first_token()
            metrics.first_token_s.observe(now_s - self._begun_s)
        else:
            metrics.between_tokens_s.observe(now_s - self._last_s)
        self._last_s = now_s

    async def _failed(self, stream: EventStream, error: ApiError) -> web.StreamResponse:
        if not stream.is_open:
            raise error
        await stream.fail(error)
        return stream.response


async def _first_of(reading: "asyncio.Future[Any]", ended: asyncio.Future[None], timeout_s: float | None) -> bool:
    """Waits until `reading` is done or the timeout has passed, and returns whether `reading` is done.

    Raises the error of `ended` if `ended` is done.
    """
    await asyncio.wait((reading, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        reading.cancel()
        ended.result()
    return reading.done()
