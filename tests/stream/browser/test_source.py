"""The browser as a source: newest frame first, faults, and waits that `close` ends."""

import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from av import VideoFrame

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.browser.source import CONVERSION_BUSY, BrowserSource, Lateness
from redline.stream.latency import Latency
from redline.stream.sources import SourceFault
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import Previewed
from stream.clocks import ManualClock

pytestmark = pytest.mark.timeout(HANGS_S)


def picture(value: int, pts: int = 0, size: tuple[int, int] = (24, 32)) -> VideoFrame:
    frame = VideoFrame.from_ndarray(np.full((*size, 3), value, np.uint8), format="rgb24")
    frame.pts = pts
    return frame


def made(latency: Latency | None = None, **options) -> BrowserSource:
    return BrowserSource(24, 32, Fraction(30), latency or Latency(), **options)


def test_the_newest_frame_wins_and_the_others_are_counted() -> None:
    latency, clock = Latency(), ManualClock()
    source = made(latency, clock=clock)
    line = source.connect()
    for number in range(5):
        line.put(picture(40 * number, 9000 * number + 777))
        clock.pass_s(0.1)
    frames = source.frames()
    frame = next(frames)
    assert frame.index == 4 and int(frame.pixels[0, 0, 0]) == 160 and latency.report().drops == {CONVERSION_BUSY: 4}
    assert frame.captured_s == pytest.approx(100.4), "captured when it arrived, not when it was read"
    line.put(picture(9, 777 + 9000 * 7))
    after = next(frames)
    assert (after.index, after.time_s - frame.time_s, frame.pts) == (5, Fraction(3 * 9000, 90_000), 0)
    source.close()
    assert list(frames) == []


def test_frames_have_one_size_whatever_the_camera_does() -> None:
    source = made()
    line = source.connect()
    frames = source.frames()
    for size in ((24, 32), (12, 16), (480, 640), (90, 50)):
        line.put(picture(50, size=size))
        assert next(frames).pixels.shape == (24, 32, 3)


def test_a_page_that_goes_is_a_fault_and_the_next_one_is_waited_for() -> None:
    source = made()
    line = source.connect()
    line.put(picture(1))
    frames = source.frames()
    next(frames)
    line.end()
    with pytest.raises(SourceFault, match=r"^the browser stopped sending\.$"):
        next(frames)
    timer = threading.Timer(0.2, lambda: source.connect().put(picture(77)))
    timer.start()
    again = next(source.frames())
    assert int(again.pixels[0, 0, 0]) == 77 and again.index == 0
    timer.join()


def test_closing_ends_the_wait_for_a_page() -> None:
    source = made()
    timer = threading.Timer(0.1, source.close)
    timer.start()
    assert list(source.frames()) == []
    timer.join()
    assert source.connect().ended, "a page that comes later is not kept"


def test_silence_is_a_fault_but_the_first_frame_may_take_its_time() -> None:
    source = made(silence_s=0.05)
    line = source.connect()
    timer = threading.Timer(0.2, lambda: line.put(picture(3)))
    timer.start()
    frames = source.frames()
    assert int(next(frames).pixels[0, 0, 0]) == 3
    with pytest.raises(SourceFault, match=r"^the browser sent nothing for 0\.05 s\.$"):
        next(frames)
    timer.join()


def test_a_frame_that_is_too_large_is_refused() -> None:
    class Huge:
        width, height = 8192, 4320

    with pytest.raises(RedlineError, match=r"^camera frames of 8192×4320 are too large .*\.$"):
        made().connect().put(Huge())


@pytest.mark.parametrize("size", [(0, 32), (15, 64), (64, 4097)])
def test_an_impossible_size_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(RedlineError, match=r"^invalid size .* for a browser: sides must have 16 to 4096 pixels\.$"):
        BrowserSource(*size, Fraction(30), Latency())


def test_a_previewed_source_passes_its_frames_on() -> None:
    seen = []
    clip = SyntheticClip(8, 10, count=4)
    tapped = Previewed(clip, seen.append)
    assert (tapped.name, tapped.is_live, tapped.height, tapped.width) == (clip.name, False, 8, 10)
    assert [frame.index for frame in tapped.frames()] == [frame.index for frame in seen] == [0, 1, 2, 3]


def test_reading_does_not_spin_while_it_waits() -> None:
    source = made()
    reader = threading.Thread(target=lambda: list(source.frames()))
    reader.start()
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.1
    source.close()
    reader.join(PATIENCE_S)


def test_what_is_known_of_the_way_here_counts_as_latency() -> None:
    clock = ManualClock()
    source = made(clock=clock)
    line, frames = source.connect(), source.frames()
    ages_s = []
    # Sent every 0.1 s; the third is 0.05 s late and the fifth catches up.
    for pts, arrives_s in ((0, 0.0), (9000, 0.1), (18_000, 0.25), (27_000, 0.32), (36_000, 0.4)):
        clock.pass_s(arrives_s + 100 - clock.now_s())
        line.put(picture(0, pts))
        ages_s.append(clock.now_s() - next(frames).captured_s)
    assert ages_s == pytest.approx([0, 0, 0.05, 0.02, 0], abs=1e-3)


def test_clocks_that_run_apart_are_not_taken_for_a_queue() -> None:
    lateness, worst = Lateness(), 0.0
    for second in range(0, 86_400, 10):
        worst = max(worst, lateness.of(second * (1 - 100e-6), 50 + second))
    assert worst < 0.01


def test_a_queue_that_built_up_on_the_way_ends_the_connection() -> None:
    clock = ManualClock()
    line = made(clock=clock).connect()
    with pytest.raises(RedlineError, match=r"^camera frames arrive 2\.\d s late: reconnecting\.$"):
        for number in range(200):
            line.put(picture(0, number * 3000))
            clock.pass_s(1 / 20)
