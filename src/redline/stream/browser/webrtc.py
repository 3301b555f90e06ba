"""The WebRTC connection to one page: pictures of its camera come in, the stream's go out.

Nothing outside is asked (no STUN or TURN server), and the candidates of the page are not used: it is the page that
knocks, at addresses that only it was told, so this side sends to nobody who did not. A page served to this machine
alone gets sockets that only this machine can reach.
"""

import asyncio
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCRtpTransceiver, RTCSessionDescription
from aiortc.codecs import vpx
from aiortc.mediastreams import VIDEO_CLOCK_RATE, VIDEO_TIME_BASE, MediaStreamError, MediaStreamTrack
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription
from av import VideoFrame

from redline.errors import RedlineError
from redline.stream.access import is_loopback
from redline.stream.browser.broadcast import Broadcast, Published, Viewer
from redline.stream.browser.images import to_codec_frame
from redline.stream.browser.messages import MessageError, Offer
from redline.stream.browser.source import CameraFeed

# aiortc begins at 0.5 and stops at 1.5 Mbit/s, which blurs what the model made; the browser still asks for less.
vpx.DEFAULT_BITRATE, vpx.MAX_BITRATE = 3_000_000, 12_000_000
# What a machine sends to any of its own addresses goes through this device, and nothing from outside does.
_LOOPBACK = b"lo"
_CONNECT_S = 10.0
_REPEAT_AFTER_S = 1.0
_VIDEO = [codec for codec in RTCRtpSender.getCapabilities("video").codecs if codec.name.lower() in ("vp8", "rtx")]


class BroadcastTrack(MediaStreamTrack):
    """The encoder asks for a picture when the last is encoded and sent, and gets the newest."""

    kind = "video"

    def __init__(self, outlet: Broadcast) -> None:
        super().__init__()
        self._outlet = outlet
        self.view: Viewer = outlet.view()
        self._last_pts = -1
        self._under_way: Published | None = None

    async def recv(self) -> VideoFrame:
        if self._under_way is not None:
            self.view.sent(self._under_way)
            self._under_way = None
        if self.readyState != "live" or (seen := await self.view.next(_REPEAT_AFTER_S)) is None:
            self.stop()
            raise MediaStreamError
        put, is_new = seen
        picture = await asyncio.to_thread(to_codec_frame, put.frame.pixels, put.frame.pixel_aspect)
        self._last_pts = max(self._last_pts + 1, int(self._outlet.clock.now_s() * VIDEO_CLOCK_RATE))
        picture.pts, picture.time_base = self._last_pts, VIDEO_TIME_BASE
        self._under_way = put if is_new else None
        return picture

    def stop(self) -> None:
        self.view.leave()
        super().stop()


class WebRtcConnection:
    """Made for one offer, and closed once; `closed` is set when the other side is gone too."""

    def __init__(self, host: str, outlets: Mapping[str, Broadcast], line: CameraFeed | None) -> None:
        self._host, self._outlets, self._line = host, outlets, line
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self._connection.on("connectionstatechange", self._state_changed)
        self._connected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()
        self.why_closed = ""
        self.views: dict[str, Viewer] = {}

    @property
    def sends(self) -> bool:
        return self._line is not None and not self._line.ended

    @property
    def closing(self) -> bool:
        """Whether this side has ended it."""
        return self._closing is not None

    async def answer(self, offer: Offer) -> str:
        directions = _directions(offer)
        receiver: RTCRtpTransceiver | None = None
        for name, direction in zip(offer.lines, directions, strict=True):
            if direction == "sendonly":
                transceiver = receiver = self._connection.addTransceiver("video", "recvonly")
            else:
                track = BroadcastTrack(self._outlets[name])
                self.views[name] = track.view
                transceiver = self._connection.addTransceiver(track, "sendonly")
            transceiver.setCodecPreferences(_VIDEO)
        _keep_to(self._connection, self._host)
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(_without_candidates(offer.sdp), "offer"))
            await self._connection.setLocalDescription()
        # An offer is untrusted text, and aiortc raises whatever comes up while it reads it.
        except Exception as error:
            raise MessageError(f"the offer cannot be answered ({error or type(error).__name__}).", "offer") from error
        if receiver is not None and self._line is not None:
            self._tasks.append(asyncio.create_task(self._receive(receiver.receiver.track, self._line)))
        self._tasks.append(asyncio.create_task(self._give_up()))
        return self._connection.localDescription.sdp

    async def close(self) -> None:
        """Done to its end even where whoever asked for it is cancelled: half closed, its sockets would stay open."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._line is not None:
            self._line.end()
        for task in self._tasks:
            task.cancel()
        for sender in self._connection.getSenders():
            if sender.track is not None:
                sender.track.stop()
        await self._connection.close()
        self.closed.set()

    async def _receive(self, track: MediaStreamTrack, line: CameraFeed) -> None:
        try:
            while True:
                picture = await track.recv()
                if isinstance(picture, VideoFrame):
                    line.put(picture)
        except MediaStreamError:
            self._lost("the browser has stopped sending.")
        except RedlineError as error:
            line.end(str(error))
            self._lost(str(error))

    async def _give_up(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), _CONNECT_S)
            return
        self._lost(f"no WebRTC connection came about within {_CONNECT_S:g} s: is UDP between here and there blocked?")

    def _state_changed(self) -> None:
        match self._connection.connectionState:
            case "connected":
                self._connected.set()
            case "failed" | "closed":
                self._lost("the WebRTC connection was lost.")

    def _lost(self, why: str) -> None:
        if self._line is not None:
            self._line.end()
        self.why_closed = self.why_closed or why
        self.closed.set()


def _directions(offer: Offer) -> list[str]:
    try:
        media = SessionDescription.parse(offer.sdp).media
    except Exception as error:
        raise MessageError("the offer's SDP cannot be read.", "offer") from error
    wanted = ["sendonly" if name == "camera" else "recvonly" for name in offer.lines]
    if [(line.kind, line.direction) for line in media] != [("video", direction) for direction in wanted]:
        raise MessageError(f"an offer of {', '.join(offer.lines)} holds a video line for each, and no other.", "offer")
    if not all(any(codec.mimeType.lower() == "video/vp8" for codec in line.rtp.codecs) for line in media):
        raise MessageError("this browser offers no VP8 video.", "offer")
    if not all(line.dtls is not None and line.dtls.fingerprints for line in media):
        raise MessageError("the offer has no fingerprint, so its connection could not be secured.", "offer")
    return wanted


def _without_candidates(sdp: str) -> str:
    """Without an end of candidates either, so that aioice waits for the page's first knock."""
    dropped = ("a=candidate:", "a=end-of-candidates")
    return "".join(line for line in sdp.splitlines(keepends=True) if not line.startswith(dropped))


def _keep_to(connection: RTCPeerConnection, host: str) -> None:
    """aiortc has no setting for the addresses of its sockets, so this connection's own gathering is told."""
    ice = connection.getTransceivers()[0].receiver.transport.transport.iceGatherer._connection
    gather_at = ice.get_component_candidates

    async def gather(component: int, addresses: list[str], timeout: int = 5) -> Any:
        candidates = await gather_at(component, addresses=_addresses(host, addresses), timeout=timeout)
        for protocol in ice._protocols if is_loopback(host) and _can_close_off() else ():
            udp = protocol.transport.get_extra_info("socket")
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
        return candidates

    ice.get_component_candidates = gather


def _addresses(host: str, found: list[str]) -> list[str]:
    if is_loopback(host):
        # Firefox does not pair its own address with 127.0.0.1, but does with that of the machine in its network.
        return ["127.0.0.1", *(address for address in found if "." in address and _can_close_off())]
    return ["127.0.0.1", *found] if host in ("0.0.0.0", "::") else [str(socket.getaddrinfo(host, None)[0][4][0])]


def _can_close_off() -> bool:
    """Whether the kernel lets a socket be bound to a device: Linux does since 5.7."""
    if sys.platform != "linux":
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
        except OSError:
            return False
    return True
