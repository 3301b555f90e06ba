"""RTSP cameras, and the capture times and timeouts of streams that are not read in time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import av
import pytest

from patience import HANGS_S, PATIENCE_S
from redline.stream.sources import SourceFault
from redline.stream.sources.live_input import Address, LiveInput, open_network
from stream.clocks import ManualClock
from stream.sources.rtsp_camera import RtspCamera
from upscale.video.clips import make_clip

pytestmark = pytest.mark.timeout(HANGS_S)
PLAIN = {"preset": "ultrafast", "tune": "zerolatency"}


@contextmanager
def filmed(camera: RtspCamera, greys: Callable[[], int]) -> Iterator[None]:
    """Runs a camera in a thread that sends frames of these greys."""
    stop = threading.Event()

    def film() -> None:
        while not stop.wait(0.02):
            if camera.playing.is_set():
                with suppress(OSError):
                    camera.show(greys())

    thread = threading.Thread(target=film)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_rtsp_brings_every_frame_in_its_order_and_is_reopened() -> None:
    shown = count()
    with RtspCamera(48, 64) as camera, filmed(camera, lambda: 20 + next(shown) % 200):
        source = open_network(camera.url)
        assert isinstance(source, LiveInput) and (source.height, source.width, source.rate) == (48, 64, 25)
        frames = source.frames()
        seen = list(islice(frames, 8))
        camera.hang_up()
        with pytest.raises(SourceFault, match=r"^'rtsp://127\.0\.0\.1:\d+/live' (has ended|is lost: .*)\.$"):
            list(frames)
        seen += islice(source.frames(), 2)
        source.close()
        assert camera.connections == 2
    greys = [round(float(frame.pixels.float().mean())) for frame in seen]
    assert (greys[7] - greys[0]) % 200 == pytest.approx(7, abs=2)
    assert [round(float(frame.time_s - seen[0].time_s), 2) for frame in seen[:8]] == [0.04 * n for n in range(8)]


def test_what_came_before_the_first_frame_was_asked_for_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A camera continues while a model is set up, so its first frame would be as old as the set-up takes."""
    monkeypatch.setattr("redline.stream.sources.live_input._WAITED_S", 0.1)
    monkeypatch.setattr("redline.stream.sources.live_input._LONGEST_S", PATIENCE_S)
    begun, old, new = threading.Event(), 40, 200

    def greys() -> int:
        # From then on slowly enough that whoever has read all before must wait.
        return new if begun.is_set() and not time.sleep(0.3) else old

    with RtspCamera() as camera, filmed(camera, greys):
        source = open_network(camera.url)
        begun.set()
        frame = next(source.frames())
        source.close()
    assert float(frame.pixels.float().mean()) == pytest.approx(new, abs=8)


def scripted(path: Path, before: Callable[[int], object], form: str) -> Callable[[Address], object]:
    """Opens a video as another format, and calls `before` for each packet."""

    def opened(address: Address) -> object:
        container = av.open(str(path))

        def demux(stream: object) -> Iterator[object]:
            for number, packet in enumerate(container.demux(stream)):
                before(number)
                yield packet

        shape = SimpleNamespace(name=form, flags=0)
        parts = {name: getattr(container, name) for name in ("streams", "close")}
        return SimpleNamespace(demux=demux, format=shape, duration=None, **parts)

    return opened


@pytest.mark.parametrize(("form", "lag_s"), [("rtsp", 1.0), ("flv", 0.0)])
def test_a_frame_that_ends_with_the_next_is_as_old_as_its_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, lag_s: float
) -> None:
    clock = ManualClock()
    make_clip(tmp_path / "a.mkv", frames=6, options=PLAIN)
    opened = scripted(tmp_path / "a.mkv", lambda number: clock.pass_s(1), form)
    monkeypatch.setattr("redline.stream.sources.live_input._opened", opened)
    frames = LiveInput(Address("a", "'a'"), clock).frames()
    next(frames)
    for _ in range(3):
        frame = next(frames)
        assert clock.now_s() - frame.captured_s == lag_s
    frames.close()


def test_a_stall_is_reported_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout FFmpeg returns its last frame, and only the next read would fail, one timeout later."""
    passed = [0.0]

    def wait(number: int) -> None:
        passed[0] += 5.0 if number == 3 else 0.01

    make_clip(tmp_path / "a.mkv", frames=9, options=PLAIN)
    monkeypatch.setattr("redline.stream.sources.live_input._opened", scripted(tmp_path / "a.mkv", wait, "rtsp"))
    clock = SimpleNamespace(monotonic=lambda: passed[0])
    monkeypatch.setattr("redline.stream.sources.live_input.time", clock)
    source, seen = LiveInput(Address("a", "'a'", read_s=5.0)), []
    with pytest.raises(SourceFault, match=r"^'a' is lost: no answer within 5 s\.$"):
        for frame in source.frames():
            seen.append(frame.index)
    assert seen == [0, 1, 2, 3, 4], "the picture itself is shown"
