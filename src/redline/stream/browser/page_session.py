"""One open page: what it says is done or answered with a sentence, and what it is told never waits for a slow one."""

import asyncio
import json
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from aiohttp import WSMsgType, web

from redline.errors import RedlineError
from redline.stream.browser.messages import LONGEST_MESSAGE_BYTES, Change, MessageError, Offer, Ping, Stop, read
from redline.stream.browser.metrics import view_figures
from redline.stream.browser.webrtc import WebRtcConnection

MOST_MESSAGES_A_SECOND = 60
_SEND_S = 5.0


class Desk(Protocol):
    """What all pages share."""

    def open_peer(self, session: "Session", offer: Offer) -> WebRtcConnection: ...

    async def change(self, changes: dict[str, Any]) -> None: ...

    @property
    def settings(self) -> dict[str, Any]: ...


class Session:
    def __init__(self, socket: web.WebSocketResponse, desk: Desk) -> None:
        self._socket, self._desk = socket, desk
        self.peer: WebRtcConnection | None = None
        self._watch: asyncio.Task[None] | None = None
        self._push: asyncio.Task[None] | None = None
        self._later: set[asyncio.Task[None]] = set()
        self._second, self._messages = 0, 0

    async def run(self) -> None:
        try:
            async for message in self._socket:
                if not await self._hear(message.type, message.data):
                    break
        finally:
            await self.drop_peer()
            for task in (self._watch, self._push, *self._later):
                if task is not None:
                    task.cancel()

    async def say(self, said: dict[str, Any]) -> None:
        """A page that takes nothing for so long is gone."""
        try:
            await asyncio.wait_for(self._socket.send_str(json.dumps(said, allow_nan=False)), _SEND_S)
        except (ConnectionError, TimeoutError, RuntimeError):
            with suppress(ConnectionError, RuntimeError):
                await self._socket.close()

    async def complain(self, text: str, about: str) -> None:
        await self.say({"type": "error", "about": about, "text": text})

    def push(self, figures: dict[str, Any]) -> None:
        """Figures that come while the last are still under way are left out."""
        if self._push is None or self._push.done():
            views = view_figures(self.peer.views) if self.peer is not None else {}
            self._push = asyncio.create_task(self.say(figures | {"views": views}))

    def later(self, said: dict[str, Any]) -> None:
        """Without waiting for it to be sent."""
        task = asyncio.create_task(self.say(said))
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def end(self, text: str) -> None:
        await self.say({"type": "ended", "text": text})
        with suppress(ConnectionError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self._socket.close(), 1.0)

    async def drop_peer(self) -> None:
        peer = self.peer
        if peer is None:
            return
        await peer.close()
        if self.peer is peer:
            self.peer = None

    async def _hear(self, kind: WSMsgType, data: str | bytes) -> bool:
        """Whether to go on listening."""
        second = int(monotonic())
        self._messages = self._messages + 1 if second == self._second else 1
        self._second = second
        if self._messages > MOST_MESSAGES_A_SECOND:
            await self.complain(f"more than {MOST_MESSAGES_A_SECOND} messages a second are too many.", "message")
            return False
        try:
            if kind is not WSMsgType.TEXT or not isinstance(data, str):
                raise MessageError("a message is text.")
            if len(data) > LONGEST_MESSAGE_BYTES:
                raise MessageError(f"a message has at most {LONGEST_MESSAGE_BYTES} bytes, not {len(data)}.")
            await self._do(read(data))
        except RedlineError as error:
            await self.complain(str(error), error.about if isinstance(error, MessageError) else "message")
        return True

    async def _do(self, said: Offer | Change | Ping | Stop) -> None:
        match said:
            case Ping():
                await self.say({"type": "pong", "sent": said.sent})
            case Stop():
                await self.drop_peer()
            case Change():
                await self._change(said)
            case Offer():
                await self.drop_peer()
                await self._connect(said)

    async def _change(self, said: Change) -> None:
        try:
            await self._desk.change(said.settings)
        except RedlineError as error:
            await self.say({"type": "error", "about": "settings", "text": str(error), "settings": self._desk.settings})

    async def _connect(self, offer: Offer) -> None:
        self.peer = self._desk.open_peer(self, offer)
        try:
            answer = await self.peer.answer(offer)
        except BaseException:
            await self.drop_peer()
            raise
        self._watch = asyncio.create_task(self._until_closed(self.peer))
        await self.say({"type": "answer", "sdp": answer})

    async def _until_closed(self, peer: WebRtcConnection) -> None:
        await peer.closed.wait()
        if self.peer is peer and not peer.closing:
            await self.drop_peer()
            await self.say({"type": "closed", "text": peer.why_closed})
