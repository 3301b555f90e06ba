"""The WebRTC connection to one page: receives frames from its camera, and sends the frames of the stream.

No STUN or TURN server is used, and the candidates of the page are ignored: the page connects to the addresses in the
answer, so the server sends only to addresses from which it has received packets. If the page is served on loopback, the
sockets can be reached only from this machine.
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
from redline.stream.browser.broadcast import Broadcast, Published, Viewer, to_codec_frame
from redline.stream.browser.messages import MessageError, Offer
from redline.stream.browser.source import CameraFeed
from redline.web.access import is_loopback

# Raises aiortc's bitrates, because its defaults (0.5 to 1.5 Mbit/s) blur the image. A browser can still request less.
vpx.DEFAULT_BITRATE, vpx.MAX_BITRATE = 3_000_000, 12_000_000  # pyrefly: ignore[bad-assignment]
# Traffic from a machine to any of its own addresses uses this network device; traffic from outside does not.
_LOOPBACK = b"lo"
_CONNECT_TIMEOUT_S = 10.0
_REPEAT_AFTER_S = 1.0
_VIDEO = [codec for codec in RTCRtpSender.getCapabilities("video").codecs if codec.name.lower() in ("vp8", "rtx")]


class BroadcastTrack(MediaStreamTrack):
    """A video track that returns the newest frame whenever the previous one has been encoded and sent."""

    kind = "video"

    def __init__(self, broadcast: Broadcast) -> None:
        super().__init__()
        self._broadcast = broadcast
        self.viewer: Viewer = broadcast.add_viewer()
        self._last_pts = -1
        self._sending: Published | None = None

    async def recv(self) -> VideoFrame:
        if self._sending is not None:
            self.viewer.sent(self._sending)
            self._sending = None
        if self.readyState != "live" or (newest := await self.viewer.next(_REPEAT_AFTER_S)) is None:
            self.stop()
            raise MediaStreamError
        published, is_new = newest
        frame = await asyncio.to_thread(to_codec_frame, published.frame.pixels, published.frame.pixel_aspect)
        self._last_pts = max(self._last_pts + 1, int(self._broadcast.clock.now_s() * VIDEO_CLOCK_RATE))
        frame.pts, frame.time_base = self._last_pts, VIDEO_TIME_BASE
        self._sending = published if is_new else None
        return frame

    def stop(self) -> None:
        self.viewer.leave()
        super().stop()


class WebRtcConnection:
    """Answers one offer. `closed` is set when either side has ended the connection."""

    def __init__(self, host: str, broadcasts: Mapping[str, Broadcast], feed: CameraFeed | None) -> None:
        self._host, self._broadcasts, self._feed = host, broadcasts, feed
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self._connection.on("connectionstatechange", self._state_changed)
        self._connected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()
        self.why_closed = ""
        self.viewers: dict[str, Viewer] = {}

    @property
    def sends(self) -> bool:
        return self._feed is not None and not self._feed.ended

    @property
    def closing(self) -> bool:
        """Whether the server has begun to close the connection."""
        return self._closing is not None

    async def answer(self, offer: Offer) -> str:
        directions = _directions(offer)
        receiver: RTCRtpTransceiver | None = None
        for name, direction in zip(offer.lines, directions, strict=True):
            if direction == "sendonly":
                transceiver = receiver = self._connection.addTransceiver("video", "recvonly")
            else:
                track = BroadcastTrack(self._broadcasts[name])
                self.viewers[name] = track.viewer
                transceiver = self._connection.addTransceiver(track, "sendonly")
            transceiver.setCodecPreferences(_VIDEO)
        _restrict_addresses(self._connection, self._host)
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(_without_candidates(offer.sdp), "offer"))
            await self._connection.setLocalDescription()
        # An offer is untrusted input, for which aiortc may raise any type of exception.
        except Exception as error:
            raise MessageError(f"offer: it cannot be answered ({error or type(error).__name__}).", "offer") from error
        if receiver is not None and self._feed is not None:
            self._tasks.append(asyncio.create_task(self._receive(receiver.receiver.track, self._feed)))
        self._tasks.append(asyncio.create_task(self._time_out()))
        return self._connection.localDescription.sdp

    async def close(self) -> None:
        """Closes the connection, even if the caller is cancelled, because the sockets would otherwise stay open."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._feed is not None:
            self._feed.end()
        for task in self._tasks:
            task.cancel()
        for sender in self._connection.getSenders():
            if sender.track is not None:
                sender.track.stop()
        await self._connection.close()
        self.closed.set()

    async def _receive(self, track: MediaStreamTrack, feed: CameraFeed) -> None:
        try:
            while True:
                frame = await track.recv()
                if isinstance(frame, VideoFrame):
                    feed.put(frame)
        except MediaStreamError:
            self._lost("the browser stopped sending.")
        except RedlineError as error:
            feed.end(str(error))
            self._lost(str(error))

    async def _time_out(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), _CONNECT_TIMEOUT_S)
            return
        self._lost(f"no WebRTC connection within {_CONNECT_TIMEOUT_S:g} s: check that UDP is not blocked.")

    def _state_changed(self) -> None:
        match self._connection.connectionState:
            case "connected":
                self._connected.set()
            case "failed" | "closed":
                self._lost("the WebRTC connection was lost.")

    def _lost(self, why: str) -> None:
        if self._feed is not None:
            self._feed.end()
        self.why_closed = self.why_closed or why
        self.closed.set()


def _directions(offer: Offer) -> list[str]:
    try:
        media = SessionDescription.parse(offer.sdp).media
    except Exception as error:
        raise MessageError("offer: the SDP cannot be parsed.", "offer") from error
    wanted = ["sendonly" if name == "camera" else "recvonly" for name in offer.lines]
    if [(line.kind, line.direction) for line in media] != [("video", direction) for direction in wanted]:
        raise MessageError(f"offer: the SDP must have one video track for each of {', '.join(offer.lines)}.", "offer")
    if not all(any(codec.mimeType.lower() == "video/vp8" for codec in line.rtp.codecs) for line in media):
        raise MessageError("offer: the browser does not support VP8 video.", "offer")
    if not all(line.dtls is not None and line.dtls.fingerprints for line in media):
        raise MessageError("offer: the SDP has no DTLS fingerprint.", "offer")
    return wanted


def _without_candidates(sdp: str) -> str:
    """Removes the candidates and the end-of-candidates line. Without them, aioice waits for the page's first packet."""
    removed = ("a=candidate:", "a=end-of-candidates")
    return "".join(line for line in sdp.splitlines(keepends=True) if not line.startswith(removed))


def _restrict_addresses(connection: RTCPeerConnection, host: str) -> None:
    """Opens sockets only on addresses that `host` allows. Patches aioice: aiortc has no setting for this."""
    ice = connection.getTransceivers()[0].receiver.transport.transport.iceGatherer._connection
    gather_all = ice.get_component_candidates

    async def gather(component: int, addresses: list[str], timeout: int = 5) -> Any:
        candidates = await gather_all(component, addresses=_addresses(host, addresses), timeout=timeout)
        for protocol in ice._protocols if is_loopback(host) and _can_bind_to_device() else ():
            udp = protocol.transport.get_extra_info("socket")
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
        return candidates

    ice.get_component_candidates = gather


def _addresses(host: str, found: list[str]) -> list[str]:
    if is_loopback(host):
        # Firefox forms no ICE candidate pair with 127.0.0.1, only with the network address of this machine.
        return ["127.0.0.1", *(address for address in found if "." in address and _can_bind_to_device())]
    return ["127.0.0.1", *found] if host in ("0.0.0.0", "::") else [str(socket.getaddrinfo(host, None)[0][4][0])]


def _can_bind_to_device() -> bool:
    """Returns whether an unprivileged socket can be bound to a network device (Linux 5.7 and newer)."""
    if sys.platform != "linux":
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
        except OSError:
            return False
    return True
