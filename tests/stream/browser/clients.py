"""A page without a browser: a WebSocket and an aiortc connection, in the event loop of the test."""

import asyncio
import json
from contextlib import asynccontextmanager
from fractions import Fraction

import numpy as np
from aiohttp import ClientSession, WSMsgType
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamTrack
from av import VideoFrame

from patience import PATIENCE_S
from redline.stream.browser import webrtc


class ColourTrack(MediaStreamTrack):
    """A camera that repeats one image, or sends what `picture` returns for the frame number."""

    kind = "video"

    def __init__(self, picture, rate: float = 30) -> None:
        super().__init__()
        self._picture, self._rate, self.sent = picture, rate, 0

    async def recv(self) -> VideoFrame:
        await asyncio.sleep(1 / self._rate)
        pixels = self._picture(self.sent) if callable(self._picture) else self._picture
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        frame.pts, frame.time_base = int(self.sent * 90_000 / self._rate), Fraction(1, 90_000)
        self.sent += 1
        return frame


class FakePage:
    def __init__(self, socket) -> None:
        self.socket = socket
        self.said: list[dict] = []
        self.connection: RTCPeerConnection | None = None

    async def say(self, **said) -> None:
        await self.socket.send_str(json.dumps(said))

    async def hear(self, kind: str, timeout_s: float = PATIENCE_S) -> dict:
        """Returns the next message of this type; all messages are kept in `said`."""
        async with asyncio.timeout(timeout_s):
            while True:
                message = await self.socket.receive()
                if message.type is not WSMsgType.TEXT:
                    raise ConnectionError(f"closed while waiting for {kind}: {message}")
                heard = json.loads(message.data)
                self.said.append(heard)
                if heard["type"] == kind:
                    return heard

    async def offer(self, lines: list[str], camera: MediaStreamTrack | None = None) -> dict[str, MediaStreamTrack]:
        """Connects and returns the received tracks by name."""
        sdp = await self.make_offer(lines, camera)
        await self.say(type="offer", sdp=sdp, lines=lines)
        answer = await self.hear("answer")
        await self.connection.setRemoteDescription(RTCSessionDescription(answer["sdp"], "answer"))
        transceivers = self.connection.getTransceivers()
        return {name: transceivers[at].receiver.track for at, name in enumerate(lines) if name != "camera"}

    async def make_offer(self, lines: list[str], camera: MediaStreamTrack | None = None) -> str:
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        for name in lines:
            if name == "camera":
                self.connection.addTransceiver(camera, "sendonly")
            else:
                self.connection.addTransceiver("video", "recvonly")
        # A machine without a network has no other address.
        webrtc._restrict_addresses(self.connection, "127.0.0.1")
        await self.connection.setLocalDescription()
        return self.connection.localDescription.sdp

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()


@asynccontextmanager
async def open_page(url: str, **headers: str):
    """Opens the WebSocket of the page at `url` as a browser would."""
    place = url.partition("://")[2].partition("/")[0]
    headers = {"Origin": f"http://{place}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    query = url.partition("?")[2]
    async with ClientSession() as http, http.ws_connect(f"http://{place}/socket?{query}", headers=headers) as socket:
        page = FakePage(socket)
        try:
            yield page
        finally:
            await page.close()


def vp8_only() -> list:
    return [codec for codec in RTCRtpSender.getCapabilities("video").codecs if codec.name in ("VP8", "rtx")]


async def picture_of(track: MediaStreamTrack, timeout_s: float = PATIENCE_S) -> np.ndarray:
    async with asyncio.timeout(timeout_s):
        return (await track.recv()).to_ndarray(format="rgb24")
