"""One open page: answers its messages, and sends it metrics and settings."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from aiohttp import WSMsgType, web

from redline.errors import RedlineError
from redline.stream.browser.messages import (
    LONGEST_MESSAGE_BYTES,
    Change,
    Message,
    MessageError,
    Offer,
    Ping,
    Stop,
    read,
)
from redline.stream.browser.webrtc import WebRtcConnection

MAX_MESSAGES_PER_SECOND = 60
_SEND_TIMEOUT_S = 5.0


class Server(Protocol):
    """What a page asks of the server."""

    @property
    def settings(self) -> dict[str, Any]: ...
    async def change(self, changes: dict[str, Any]) -> None: ...
    def open_connection(self, offer: Offer) -> WebRtcConnection: ...


class PageSession:
    """Handles the messages of one page until its WebSocket is closed. A slow page never blocks the others."""

    def __init__(self, socket: web.WebSocketResponse, server: Server) -> None:
        self._socket, self._server = socket, server
        self.connection: WebRtcConnection | None = None
        self._metrics: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._second, self._messages = 0, 0

    async def run(self) -> None:
        try:
            async for message in self._socket:
                if not await self._handle(message.type, message.data):
                    break
        finally:
            await self.disconnect()
            for task in self._tasks:
                task.cancel()

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Closes the socket if the page does not accept it in time."""
        try:
            await asyncio.wait_for(self._socket.send_str(json.dumps(message, allow_nan=False)), _SEND_TIMEOUT_S)
        except (ConnectionError, TimeoutError, RuntimeError):
            with suppress(ConnectionError, RuntimeError):
                await self._socket.close()

    async def send_error(self, text: str, about: str) -> None:
        await self.send({"type": "error", "about": about, "text": text})

    def send_later(self, message: dict[str, Any]) -> asyncio.Task[None]:
        """Starts to send the message, and returns the task without waiting for it."""
        return self._start(self.send(message))

    def send_metrics(self, metrics: dict[str, Any]) -> None:
        """Sends the metrics, unless the previous ones are still being sent."""
        if self._metrics is None or self._metrics.done():
            viewers = self.connection.viewers if self.connection is not None else {}
            views = {name: viewer.metrics() for name, viewer in viewers.items()}
            self._metrics = self.send_later(metrics | {"views": views})

    async def close(self, text: str) -> None:
        await self.send({"type": "ended", "text": text})
        with suppress(ConnectionError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self._socket.close(), 1.0)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def disconnect(self) -> None:
        """Closes the WebRTC connection, if there is one."""
        connection = self.connection
        if connection is None:
            return
        await connection.close()
        if self.connection is connection:
            self.connection = None

    async def _handle(self, kind: WSMsgType, data: str | bytes) -> bool:
        """Handles one message. Returns whether to read the next one."""
        second = int(monotonic())
        self._messages = self._messages + 1 if second == self._second else 1
        self._second = second
        if self._messages > MAX_MESSAGES_PER_SECOND:
            await self.send_error(f"too many messages: at most {MAX_MESSAGES_PER_SECOND} per second.", "message")
            return False
        try:
            if kind is not WSMsgType.TEXT or not isinstance(data, str):
                raise MessageError("the message is not text.")
            if len(data) > LONGEST_MESSAGE_BYTES:
                raise MessageError(f"the message has {len(data)} bytes; at most {LONGEST_MESSAGE_BYTES} are allowed.")
            await self._answer(read(data))
        except RedlineError as error:
            await self.send_error(str(error), error.about if isinstance(error, MessageError) else "message")
        return True

    async def _answer(self, message: Message) -> None:
        match message:
            case Ping():
                await self.send({"type": "pong", "sent": message.sent})
            case Stop():
                await self.disconnect()
            case Change():
                try:
                    await self._server.change(message.settings)
                except RedlineError as error:
                    refused = {"type": "error", "about": "settings", "text": str(error)}
                    await self.send(refused | {"settings": self._server.settings})
            case Offer():
                await self.disconnect()
                await self._connect(message)

    async def _connect(self, offer: Offer) -> None:
        self.connection = self._server.open_connection(offer)
        try:
            answer = await self.connection.answer(offer)
        except BaseException:
            await self.disconnect()
            raise
        self._start(self._report_close(self.connection))
        await self.send({"type": "answer", "sdp": answer})

    async def _report_close(self, connection: WebRtcConnection) -> None:
        await connection.closed.wait()
        if self.connection is connection and not connection.closing:
            await self.disconnect()
            await self.send({"type": "closed", "text": connection.why_closed})
