"""Frames travel both ways over WebRTC, and misbehaving pages do not end the stream."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from patience import HANGS_S, PATIENCE_S
from redline.stream.browser import server
from redline.stream.browser.server import MAX_CONNECTIONS
from redline.stream.browser.webrtc import WebRtcConnection
from redline.stream.endpoints import EndpointOptions, open_endpoints
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.pipeline import Pipeline
from redline.stream.settings import LiveSettings
from redline.stream.sinks import NullSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import Paced
from stream.browser.clients import ColourTrack, open_page, picture_of
from stream.browser.conftest import Inverted, Running
from stream.doubles import Kept

pytestmark = pytest.mark.timeout(HANGS_S)
# VP8 at its first bit rate, on flat colours and away from edges.
NEAR = 12


def quarters(height: int, width: int) -> np.ndarray:
    """Four colours that differ in every channel, so that a swapped axis or channel shows."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2] = (210, 60, 40)
    picture[: height // 2, width // 2 :] = (50, 200, 90)
    picture[height // 2 :, : width // 2] = (40, 70, 220)
    picture[height // 2 :, width // 2 :] = (230, 220, 160)
    return picture


def centres(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    rows, columns = (height // 4, 3 * height // 4), (width // 4, 3 * width // 4)
    return np.array([picture[y - 2 : y + 3, x - 2 : x + 3].mean((0, 1)) for y in rows for x in columns])


async def near(track, expected: np.ndarray, height: int, width: int) -> np.ndarray:
    """Waits until a frame is as expected; the first ones may be older."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            picture = await picture_of(track)
            if np.abs(centres(picture, height, width) - expected).max() < NEAR:
                return picture


async def frames_pass(stream: Running, count: int) -> None:
    before = stream.pipeline.latency.report().frames
    async with asyncio.timeout(PATIENCE_S):
        while stream.pipeline.latency.report().frames < before + count:
            await asyncio.sleep(0.01)


def clip(height: int = 64, width: int = 96, rate: int = 60) -> Paced:
    return Paced(SyntheticClip(height, width, count=None, rate=rate))


@pytest.mark.parametrize(("height", "width"), [(96, 128), (97, 131)])
def test_the_camera_comes_back_changed(run_stream: Callable[..., Running], height: int, width: int) -> None:
    stream = run_stream(size=(height, width))

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            camera = ColourTrack(quarters(96, 128))
            tracks = await client.offer(["camera", "output", "input"], camera)
            expected = centres(quarters(height, width), height, width)
            output = await near(tracks["output"], 255 - expected, height, width)
            assert output.shape == (height + height % 2, width + width % 2, 3), "an odd side is padded"
            await near(tracks["input"], expected, height, width)
            # Those that were said before a picture was shown know nothing of one.
            while not (figures := await client.hear("figures"))["views"]["output"]["ages_s"]:
                pass
            assert figures["images"]["output"]["width"] == width
            assert figures["images"]["output"]["shown_width"] % 2 == 0
            view = figures["views"]["output"]
            assert view["taken"] > 0 and view["ages_s"][0] > view["sendings_s"][0] > 0
            assert figures["report"]["frames"] > 0

    asyncio.run(main())
    assert stream.is_alive


def test_a_page_that_listens_everywhere_is_shown_with_the_key(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(source=clip(), host="0.0.0.0", key="a key of some length")

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            tracks = await client.offer(["output"])
            assert (await picture_of(tracks["output"])).shape == (64, 96, 3)

    asyncio.run(main())


def test_a_camera_that_goes_is_waited_for_and_another_goes_on(run_stream: Callable[..., Running]) -> None:
    sink = Kept()
    stream = run_stream(sink=sink, size=(48, 64))

    async def send(colour: int) -> None:
        async with open_page(stream.page.url) as client:
            await client.offer(["camera"], ColourTrack(np.full((48, 64, 3), colour, np.uint8)))
            count = len(sink.frames)
            async with asyncio.timeout(PATIENCE_S):
                while len(sink.frames) < count + 3:
                    await asyncio.sleep(0.02)

    asyncio.run(send(60))
    deadline = time.monotonic() + PATIENCE_S
    while not stream.told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stream.is_alive and stream.told == ["the browser stopped sending. Trying again in 0.05 s."]
    asyncio.run(send(180))
    first, last = sink.frames[0], sink.frames[-1]
    assert abs(float(first.pixels.double().mean()) - 195) < NEAR and abs(float(last.pixels.double().mean()) - 75) < NEAR
    times = [frame.time_s for frame in sink.frames]
    assert times == sorted(set(times)) and [f.index for f in sink.frames] == sorted({f.index for f in sink.frames})


def test_only_one_page_sends(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(sink=NullSink(), size=(48, 64))
    grey = np.full((48, 64, 3), 99, np.uint8)

    async def main() -> None:
        async with open_page(stream.page.url) as first, open_page(stream.page.url) as second:
            await first.offer(["camera"], ColourTrack(grey))
            sdp = await second.make_offer(["camera"], ColourTrack(grey))
            await second.say(type="offer", sdp=sdp, lines=["camera"])
            error = await second.hear("error")
            assert error["text"] == "another page is sending its camera: press Watch, or stop that page first."
            await first.say(type="stop")
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await second.say(type="offer", sdp=sdp, lines=["camera"])
                    said = await second.socket.receive_json()
                    while said["type"] == "figures":
                        said = await second.socket.receive_json()
                    if said["type"] == "answer":
                        break

    asyncio.run(main())


def test_two_viewers_see_the_same_and_one_vanishes(run_stream: Callable[..., Running]) -> None:
    source = clip()
    stream = run_stream(source=source)

    async def main() -> None:
        async with open_page(stream.page.url) as stays:
            kept = await stays.offer(["output", "input"])
            async with open_page(stream.page.url) as goes:
                seen = await goes.offer(["output"])
                for track in (kept["output"], kept["input"], seen["output"]):
                    assert (await picture_of(track)).shape == (64, 96, 3)
                # As a browser that was killed: no word, no farewell.
                for transceiver in goes.connection.getTransceivers():
                    transceiver.receiver.transport.transport._connection._protocols[0].transport.abort()
                goes.socket._response.connection.transport.abort()
                for _ in range(20):
                    await picture_of(kept["output"])
                await frames_pass(stream, 1)
            figures = await stays.hear("figures")
            assert figures["report"]["stages"]["display"]["p50_s"] < 0.1, "writing waits for no viewer"

    asyncio.run(main())
    assert stream.is_alive


def test_a_page_that_falls_silent_is_released(
    run_stream: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HEARTBEAT_S", 0.2)
    stream = run_stream(source=clip())

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            await picture_of((await client.offer(["output"]))["output"])
            # Its network is gone: nothing is read, nothing is answered, and nothing is closed.
            client.socket._response.connection.transport.pause_reading()
            async with asyncio.timeout(PATIENCE_S):
                while stream.page._server._sessions:
                    await asyncio.sleep(0.05)
            client.socket._response.connection.transport.abort()

    asyncio.run(main())
    assert stream.is_alive


def test_a_viewer_that_never_answers_does_not_slow_the_stream(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(source=clip(rate=100))

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            sdp = await client.make_offer(["output"])
            await client.say(type="offer", sdp=sdp, lines=["output"])
            await client.hear("answer")
            await frames_pass(stream, 50)
            report = stream.pipeline.latency.report()
            assert report.stages["display"].p50_s < 0.1, "writing waits for no viewer"

    asyncio.run(main())


def test_pages_that_come_and_go_leave_nothing_after(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(size=(48, 64))
    grey = np.full((48, 64, 3), 99, np.uint8)

    async def visit(wait: bool) -> None:
        async with open_page(stream.page.url) as client:
            tracks = await client.offer(["camera", "output"], ColourTrack(grey))
            if wait:
                await picture_of(tracks["output"])

    def left() -> tuple[int, int, int, int]:
        files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
        views = sum(len(broadcast._viewers) for broadcast in stream.page._server.broadcasts.values())
        return len(stream.page._server._sessions), views, threading.active_count(), files

    asyncio.run(visit(True))
    deadline = time.monotonic() + PATIENCE_S
    while left()[:2] != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    before = left()
    # Some go as soon as they have come, in the middle of being connected.
    for number in range(12):
        asyncio.run(visit(number % 3 == 0))

    def is_clean() -> bool:
        sessions, views, threads, files = left()
        # Executors keep the few threads that they have started.
        return (sessions, views) == (0, 0) and threads <= before[2] + 8 and files <= before[3] + 4

    deadline = time.monotonic() + PATIENCE_S
    while not is_clean() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert before[:2] == (0, 0) and is_clean(), (before, left())
    assert stream.is_alive


def test_the_number_of_connections_is_limited(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(source=clip())

    async def main() -> None:
        async with open_page(stream.page.url) as late:
            sdp = await late.make_offer(["output"])
            clients = [open_page(stream.page.url) for _ in range(MAX_CONNECTIONS)]
            try:
                for client in clients:
                    page = await client.__aenter__()
                    await page.say(type="offer", sdp=sdp, lines=["output"])
                    await page.hear("answer")
                await late.say(type="offer", sdp=sdp, lines=["output"])
                text = f"too many connected pages: at most {MAX_CONNECTIONS} are allowed."
                assert (await late.hear("error"))["text"] == text
            finally:
                for client in clients:
                    await client.__aexit__(None, None, None)

    asyncio.run(main())


def test_the_end_of_the_stream_is_reported(run_stream: Callable[..., Running]) -> None:
    seen = threading.Event()

    class EndsWhenSeen(SyntheticClip):
        def frames(self) -> Generator[Frame, None, None]:
            yield from takewhile(lambda frame: not seen.is_set(), super().frames())

    stream = run_stream(source=Paced(EndsWhenSeen(32, 32, count=None, rate=40)))

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            tracks = await client.offer(["output"])
            await picture_of(tracks["output"])
            seen.set()
            assert (await client.hear("ended"))["text"] == "The stream has ended."

    asyncio.run(main())
    assert stream.outcome is not None and stream.outcome.complete


def test_closing_under_a_running_stream_harms_nobody(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(source=clip())

    async def main() -> None:
        async with open_page(stream.page.url) as client:
            await picture_of((await client.offer(["output"]))["output"])
            await asyncio.to_thread(stream.page.close)

    asyncio.run(main())
    asyncio.run(frames_pass(stream, 1))
    assert stream.is_alive
    assert not any(thread.name == "redline-browser" for thread in threading.enumerate())


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_video_begins_when_a_page_is_connected_and_runs_at_its_pace(is_watched: bool) -> None:
    latency, settings = Latency(), LiveSettings()
    places = open_endpoints("synthetic:32x32@50,2", "browser:0", EndpointOptions(), settings, latency)
    pipeline = Pipeline(places.source, Inverted(), places.sink, settings=settings, latency=latency)
    stream = Running(None, pipeline, [])

    async def look() -> None:
        async with open_page(places.urls[0]) as client:
            tracks = await client.offer(["output", "input"])
            await picture_of(tracks["output"])
            while stream.is_alive:
                await asyncio.sleep(0.02)

    try:
        time.sleep(0.3)
        assert latency.report().frames == 0 and stream.is_alive, "nobody looks yet"
        if is_watched:
            asyncio.run(asyncio.wait_for(look(), PATIENCE_S))
    finally:
        stream.stop()
        places.close()
    assert stream.error is None and stream.outcome.complete == is_watched
    report = stream.outcome.report
    assert report.frames + sum(report.drops.values()) == (100 if is_watched else 0)
    assert report.frames_per_s < 75


def test_the_first_reason_why_a_connection_ended_is_reported() -> None:
    async def end_twice() -> str:
        connection = WebRtcConnection("127.0.0.1", {}, None)
        connection._lost("the browser stopped sending.")
        connection._lost("the WebRTC connection was lost.")
        await connection.close()
        return connection.why_closed

    assert asyncio.run(end_twice()) == "the browser stopped sending."
