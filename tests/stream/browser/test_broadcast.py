"""Viewers get the newest frame, and none of them delays the stream."""

import asyncio
import threading
import time
from fractions import Fraction

import pytest
import torch

from patience import PATIENCE_S
from redline.stream.browser.broadcast import Broadcast, BrowserSink, Published
from redline.stream.browser.webrtc import BroadcastTrack
from redline.stream.frames import Frame
from stream.clocks import ManualClock


def frame(index: int, captured_s: float = 0.0) -> Frame:
    return Frame(torch.full((2, 2, 3), index % 256, dtype=torch.uint8), index, index, Fraction(1, 30), captured_s)


def test_a_viewer_gets_the_newest_and_knows_what_it_missed() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        broadcast.publish(frame(0))
        view = broadcast.add_viewer()
        assert (await view.next(1))[0].frame.index == 0, "what was shown last is there at once"
        for number in range(1, 6):
            broadcast.publish(frame(number))
        assert (await view.next(1))[0].frame.index == 5
        assert (view.taken, view.skipped) == (2, 4)

    asyncio.run(main())


def test_a_standing_frame_comes_again_and_is_not_counted() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        view = broadcast.add_viewer()
        broadcast.publish(frame(7))
        assert [(seen[0].frame.index, seen[1]) for seen in [await view.next(0.02) for _ in range(3)]] == [
            (7, True),
            (7, False),
            (7, False),
        ]
        assert view.taken == 1 and view.skipped == 0

    asyncio.run(main())


def test_a_viewer_that_comes_after_a_gap_does_not_measure_it() -> None:
    async def main() -> None:
        clock = ManualClock()
        broadcast = Broadcast(clock)
        broadcast.publish(frame(0, clock.now_s()))
        clock.pass_s(60)
        track = BroadcastTrack(broadcast)
        await track.recv()  # the last picture, which waited
        broadcast.publish(frame(1, clock.now_s()))
        await track.recv()
        assert track.viewer.metrics()["ages_s"] is None, "nothing that is new was sent yet"
        clock.pass_s(0.02)
        broadcast.publish(frame(2, clock.now_s()))
        await track.recv()
        assert track.viewer.metrics()["ages_s"] == pytest.approx([0.02] * 3) == track.viewer.metrics()["sendings_s"]
        assert (track.viewer.taken, track.viewer.skipped) == (3, 0)
        track.stop()

    asyncio.run(main())


def test_a_frame_from_another_thread_wakes_all_viewers() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        views = [broadcast.add_viewer() for _ in range(3)]
        timer = threading.Timer(0.1, lambda: broadcast.publish(frame(3)))
        timer.start()
        async with asyncio.timeout(PATIENCE_S):
            seen = await asyncio.gather(*(view.next(2 * PATIENCE_S) for view in views))
        assert [one[0].frame.index for one in seen] == [3, 3, 3]
        threading.Timer(0.05, broadcast.end).start()
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*(view.next(2 * PATIENCE_S) for view in views)) == [None] * 3

    asyncio.run(main())


def test_viewers_that_never_look_cost_nothing_and_a_dead_loop_is_forgotten() -> None:
    broadcast = Broadcast()

    async def look_once_and_die() -> None:
        broadcast.add_viewer()

    for _ in range(20):
        asyncio.run(look_once_and_die())
    sink = BrowserSink(broadcast)
    began = time.monotonic()
    for number in range(1000):
        sink.write(frame(number))
    assert time.monotonic() - began < 10 and not broadcast._viewers
    sink.close()
    assert broadcast.ended


def test_times_are_from_capture_and_from_the_hand_over_until_a_frame_is_sent() -> None:
    async def main() -> None:
        clock = ManualClock()
        view = Broadcast(clock).add_viewer()
        assert view.metrics()["ages_s"] is None and view.metrics()["sendings_s"] is None
        for age_s in (0.01, 0.02, 0.03):
            view.sent(Published(frame(0, clock.now_s() - age_s), 1, clock.now_s() - age_s / 2))
        assert view.metrics()["ages_s"] == pytest.approx([0.02, 0.029, 0.0298])
        assert view.metrics()["sendings_s"] == pytest.approx([0.01, 0.0145, 0.0149])

    asyncio.run(main())
