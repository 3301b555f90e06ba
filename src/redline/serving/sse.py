"""Sends server-sent events. A stream that fails ends with an event that contains the error."""

import asyncio

import msgspec
from aiohttp import web

from redline.serving.errors import ApiError

_encode = msgspec.json.Encoder().encode
# A write waits for the client if there would be at least this many unsent bytes. The value is asyncio's default limit.
_BUFFERED_BYTES = 1 << 16
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without this header, proxies such as nginx would buffer the events.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Sends JSON values as events.

    The response starts with the first event, so that an error before it can be answered with an HTTP error status.
    """

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self._request, self._stall_s = request, stall_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self.is_open = False

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, *values: msgspec.Struct) -> None:
        await self._write(b"".join(b"data: " + _encode(value) + b"\n\n" for value in values))

    async def send_bytes(self, data: bytes) -> None:
        """Sends events that another server has encoded."""
        await self._write(data)

    async def end(self) -> None:
        """Ends the response."""
        await self._response.write_eof()

    async def ping(self) -> None:
        """Sends a comment, which keeps proxies from closing a silent connection."""
        await self._write(b": keep-alive\n\n")

    async def fail(self, error: ApiError) -> None:
        """Ends the stream with an error event."""
        await self._write(b"event: error\ndata: " + error.json + b"\n\n")
        await self.end()

    async def finish(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self.end()

    async def _write(self, data: bytes) -> None:
        if not self.is_open:
            self.is_open = True
            await self._response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has closed the connection")
        if transport.get_write_buffer_size() + len(data) < _BUFFERED_BYTES:
            await self._response.write(data)
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self._response.write(data)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError(f"the client has not read the stream for {self._stall_s:.0f} s") from None
