"""WebRTC offers: invalid ones are refused, and valid ones are answered with local sockets only."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.mediastreams import AudioStreamTrack

from patience import HANGS_S
from redline.stream.browser import Page
from stream.browser.clients import open_page

pytestmark = pytest.mark.timeout(HANGS_S)


def test_offers_of_anything_else_are_refused(open_server: Callable[..., Page]) -> None:
    page = open_server(as_source=False)

    async def offer_of(*kinds: object, channel: bool = False) -> str:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        for kind in kinds:
            connection.addTransceiver(kind, "recvonly" if isinstance(kind, str) else "sendrecv")
        if channel:
            connection.createDataChannel("chat")
        sdp = (await connection.createOffer()).sdp
        await connection.close()
        return sdp

    async def main() -> None:
        async with open_page(page.url) as client:
            good = await client.make_offer(["output"])
            other = "offer: the SDP must have one video track for each of output."
            for sdp, sentence in (
                (await offer_of("audio"), other),
                (await offer_of("video", "video"), other),
                (await offer_of("video", AudioStreamTrack()), other),
                (await offer_of("video", channel=True), other),
                (good.replace("a=recvonly", "a=sendrecv"), other),
                (good.replace("VP8", "VP7"), "offer: the browser does not support VP8 video."),
                (good.replace("a=ice-pwd:", "a=ice-pw:"), "offer: it cannot be answered"),
                (good.replace("a=fingerprint:", "a=finger:"), "offer: the SDP has no DTLS fingerprint"),
                ("", other),
                (good.replace("m=video", "m=video x"), "offer: the SDP cannot be parsed."),
            ):
                await client.say(type="offer", sdp=sdp, lines=["output"])
                error = await client.hear("error")
                assert error["about"] == "offer" and error["text"].startswith(sentence), (sentence, error)
            await client.say(type="offer", sdp=good, lines=["camera"])
            assert (await client.hear("error"))["text"] == "this stream has no camera in the browser."
            await client.say(type="offer", sdp=good, lines=["output"])
            await client.hear("answer")

    asyncio.run(main())


def test_mangled_offers_never_end_the_page(open_server: Callable[..., Page]) -> None:
    page, rng = open_server(), np.random.default_rng()

    async def main() -> None:
        async with open_page(page.url) as client:
            good = await client.make_offer(["output"])
            for _ in range(25):
                lines = good.splitlines(keepends=True)
                for _ in range(rng.integers(1, 6)):
                    at = rng.integers(len(lines))
                    lines[at] = str(
                        rng.choice(["", lines[at][: rng.integers(len(lines[at]) + 1)] + "\r\n", "a=\r\n", lines[0]])
                    )
                await client.say(type="offer", sdp="".join(lines), lines=["output"])
                await client.say(type="ping", sent=1)
                await client.hear("pong")

    asyncio.run(main())


def test_sockets_are_of_this_machine_only(open_server: Callable[..., Page]) -> None:
    page = open_server(as_source=False)
    seen = {}

    async def main() -> None:
        async with open_page(page.url) as client:
            sdp = await client.make_offer(["output"])
            await client.say(type="offer", sdp=sdp, lines=["output"])
            seen["sdp"] = (await client.hear("answer"))["sdp"]
            (session,) = page._server._sessions
            ice = session.connection._connection.getTransceivers()[0].receiver.transport.transport._connection
            sockets = [protocol.transport.get_extra_info("socket") for protocol in ice._protocols]
            seen["bound"] = [(s.getsockname()[0], s.getsockopt(1, 25, 16).rstrip(b"\0")) for s in sockets]
            assert ice.remote_candidates == [], "nobody is sent to who did not send first"

    asyncio.run(main())
    assert "127.0.0.1" in seen["sdp"]
    assert all(device == b"lo" or address == "127.0.0.1" for address, device in seen["bound"])
