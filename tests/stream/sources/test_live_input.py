"""Cameras and network streams: timeouts, timestamps and reconnections."""

import io
import re
import socket
import threading
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch
from PIL import Image

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.pipeline import Backoff, Reader
from redline.stream.sinks.mjpeg import MjpegSink
from redline.stream.sources import SourceFault, live_input
from redline.stream.sources.live_input import Address, Backlog, LiveInput, open_network
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import Paced
from stream.clocks import ManualClock
from stream.doubles import Kept
from upscale.video.clips import make_clip

pytestmark = pytest.mark.timeout(HANGS_S)


@contextmanager
def shown(sink: MjpegSink, height: int = 32, width: int = 48) -> Iterator[str]:
    """Serves a sink that a thread fills."""
    stop = threading.Event()

    def feed() -> None:
        for frame in SyntheticClip(height, width, count=None).frames():
            if stop.wait(0.02):
                return
            sink.write(frame)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield sink.url
    finally:
        stop.set()
        feeder.join()


def close_to_the_clip(frame: Frame) -> bool:
    clip = SyntheticClip(32, 48)
    errors = [(frame.pixels.int() - clip.pixels(place).int()).abs().float().mean() for place in range(200)]
    return min(errors) < 12


def test_our_own_mjpeg_is_read_as_a_live_stream() -> None:
    sink = MjpegSink(port=0)
    with shown(sink) as url:
        source = open_network(url, read_s=2.0)
        assert isinstance(source, LiveInput) and source.is_live
        assert (source.height, source.width) == (32, 48)
        frames = list(islice(source.frames(), 5))
        source.close()
    sink.close()
    assert [frame.index for frame in frames] == list(range(5))
    assert all(close_to_the_clip(frame) for frame in frames)
    pts = [frame.pts for frame in frames]
    assert pts == sorted(set(pts))
    moments = [frame.captured_s for frame in frames]
    assert moments == sorted(moments) and abs(moments[-1] - time.monotonic()) < 10


def test_live_frames_come_in_the_size_that_is_asked_for() -> None:
    sink = MjpegSink(port=0)
    with shown(sink) as url:
        source = open_network(url, read_s=2.0, size=(30, 20))
        assert isinstance(source, LiveInput) and source.sent_size == (32, 48)
        assert (source.height, source.width) == (30, 20)
        frames = list(islice(source.frames(), 3))
        source.close()
    sink.close()
    assert {frame.pixels.shape for frame in frames} == {(30, 20, 3)}


def test_a_stream_that_ends_is_a_fault_and_is_reopened() -> None:
    sink = MjpegSink(port=0)
    port = sink.port
    with shown(sink) as url:
        source = open_network(url, read_s=2.0)
        frames = source.frames()
        next(frames)
        sink.close()
        with pytest.raises(
            SourceFault, match=rf"^'http://127\.0\.0\.1:{port}/stream\.mjpeg' (has ended|is lost: .*)\.$"
        ):
            for _ in frames:
                pass
    with pytest.raises(SourceFault, match=r"cannot be opened: Connection refused\.$"):
        next(source.frames())
    again = MjpegSink(port=port)
    with shown(again):
        assert next(source.frames()).height == 32
        source.close()
    again.close()


def test_an_address_that_cannot_be_reached_is_reported_without_the_password() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(RedlineError) as caught:
            open_network(f"rtsp://me:secret@127.0.0.1:{port}/live")
    text = str(caught.value)
    assert text == f"'rtsp://127.0.0.1:{port}/live' cannot be opened: Connection refused."
    assert not isinstance(caught.value, SourceFault), "nobody waits for it before the start"


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(RedlineError, match=r"no answer within 0\.3 s\.$"):
            open_network(f"http://127.0.0.1:{silent.getsockname()[1]}/film", open_s=0.3, read_s=0.3)
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("text", ["http://", "ftp://host/film.mp4", "http://host:99999/x"])
def test_what_is_no_address_is_reported(text: str) -> None:
    with pytest.raises(RedlineError, match=r"invalid address.*\.$"):
        open_network(text)


@contextmanager
def served(path: Path, breaks: int = 0, ranges: bool = False) -> Iterator[str]:
    """Serves a file; the first `breaks` answers that start in its first half stop there."""
    data, left = path.read_bytes(), [breaks]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if ranges else None
            start, end = int(asked[1]) if asked else 0, len(data)
            self.send_response(206 if ranges else 200)
            if ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if left[0] and start < end // 2:
                left[0], end = left[0] - 1, end // 2
            with suppress(OSError):
                self.wfile.write(data[start:end])

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/{path.name}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_a_video_that_breaks_off_goes_on_where_it_was(tmp_path: Path, name: str, ranges: bool) -> None:
    fast = {"movflags": "+faststart"} if name == "a.mp4" else None
    options = {"preset": "ultrafast", "g": "10", "crf": "5", "bf": "0"}
    times = make_clip(tmp_path / name, frames=100, size=(96, 64), options=options, muxer=fast)
    clock, sink, told = ManualClock(), Kept(), []
    with served(tmp_path / name, breaks=1, ranges=ranges) as url:
        source = open_network(url, clock)
        # Every frame is to be shown: so as a file is read, though the source is a live one.
        reader = Reader(source, clock, Backoff(), told.append)
        assert reader.read(lambda frame: not sink.write(frame), threading.Event())
    assert sink.indices == list(range(len(sink.frames))) and reader.faults >= 1 and "Trying again" in told[0]
    seen = [round(float(frame.time_s), 3) for frame in sink.frames]
    assert seen == sorted(set(seen)) and set(seen) <= {round(float(time), 3) for time in times}
    # Without ranges FFmpeg finds the next key frame that it can get at.
    assert len(seen) >= (99 if ranges or name == "a.mp4" else 75) and seen[-1] == pytest.approx(3.96)


def test_a_video_that_cannot_be_sought_in_is_read_again_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clip(tmp_path / "a.mkv", frames=9)
    source = LiveInput(Address(f"file:{tmp_path / 'a.mkv'}", "'a'"))
    frames = source.frames()
    assert [next(frames).index for _ in range(4)] == [0, 1, 2, 3]
    frames.close()
    opened = []

    def unseekable(address: Address) -> object:
        opened.append(av.open(address.url))
        return SimpleNamespace(
            seek=lambda *_, **__: (_ for _ in ()).throw(av.error.PermissionError(1, "not permitted")),
            **{name: getattr(opened[-1], name) for name in ("streams", "format", "demux", "close")},
        )

    monkeypatch.setattr("redline.stream.sources.live_input._opened", unseekable)
    assert [(frame.index, float(frame.time_s)) for frame in source.frames()] == [
        (index, pytest.approx(index / 25)) for index in range(4, 9)
    ]
    assert len(opened) == 2


def test_motion_jpeg_has_the_times_at_which_it_came() -> None:
    """Motion JPEG has no timestamps, and FFmpeg would assume 25 frames per second."""
    sink, clock = MjpegSink(port=0), ManualClock()
    with shown(sink) as url:
        source = open_network(url, clock, read_s=2.0)
        frames = source.frames()
        seen = []
        for gap_s in (0.2, 0.2, 1.0, 0.0, 0.2):
            seen.append(next(frames))
            clock.pass_s(gap_s)
        frames.close()
        source.close()
    sink.close()
    assert [float(frame.time_s) for frame in seen] == pytest.approx([0, 0.2, 0.4, 1.4, 1.4], abs=1e-3)
    assert [frame.pts for frame in seen] == sorted({frame.pts for frame in seen}) and seen[0].duration == 0


def test_a_video_on_a_server_comes_at_its_own_pace_and_ends(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=5)
    with served(tmp_path / "a.mkv") as url:
        source = open_network(url)
        assert isinstance(source, Paced)
        assert len(list(source.frames())) == 5


PLAIN = {"preset": "ultrafast", "tune": "zerolatency"}


def test_an_address_without_frames_is_reported(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>hello</html>" * 40)
    with served(tmp_path / "page.html") as url, pytest.raises(RedlineError, match=r"cannot be opened: .*\.$"):
        open_network(url)


def test_a_camera_that_comes_back_without_a_frame_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clip(tmp_path / "a.mkv", frames=3, options=PLAIN)
    with wave.open(str(tmp_path / "song.wav"), "wb") as song:
        song.setparams((1, 2, 8000, 0, "NONE", ""))
        song.writeframes(bytes(1600))
    opened = iter([tmp_path / "a.mkv", tmp_path / "song.wav"])
    monkeypatch.setattr("redline.stream.sources.live_input._opened", lambda address: av.open(str(next(opened))))
    source = LiveInput(Address("a", "'a'"))
    list(islice(source.frames(), 1))
    with pytest.raises(SourceFault, match="'a' has no video stream"):
        list(source.frames())


def test_closing_releases_what_was_never_read() -> None:
    sink = MjpegSink(port=0)
    with shown(sink) as url:
        source = open_network(url)
        source.close()
        assert source._waiting is None
        assert list(source.frames()) == []
    sink.close()


def test_a_size_may_change_during_a_stream(tmp_path: Path) -> None:
    """JPEGs of two sizes, as from a rotated camera."""
    sink = MjpegSink(port=0)
    with shown(sink) as url:
        source = open_network(url, read_s=2.0)
        frames = source.frames()
        sizes = {(next(frames).height, source.width)}
    for frame in [*SyntheticClip(40, 24, count=3).frames()] * 3:
        sink.write(frame)
        time.sleep(0.02)
    sizes |= {(frame.height, frame.width) for frame in islice(frames, 6)}
    source.close()
    frames.close()
    sink.close()
    assert (32, 48) in sizes and (40, 24) in sizes


def test_damaged_frames_are_skipped(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=30, options={"preset": "ultrafast", "g": "1", "crf": "5"})
    data = bytearray((tmp_path / "a.mkv").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 900] = bytes(900)
    (tmp_path / "a.mkv").write_bytes(data)
    left_out: list[str] = []
    source = LiveInput(Address(f"file:{tmp_path / 'a.mkv'}", "'a'"), drop=left_out.append)
    frames = list(source.frames())
    assert set(left_out) == {"damaged"} and len(frames) + len(left_out) < 31
    assert 15 < len(frames) < 31 and all(frame.pixels.dtype == torch.uint8 for frame in frames)


def test_a_stream_without_a_length_that_ends_is_a_fault(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 16), (200, 30, 60)).save(picture, "jpeg")
    (tmp_path / "camera").write_bytes(picture.getvalue() * 4)
    source = LiveInput(Address(f"file:{tmp_path / 'camera'}", "'the camera'", "jpeg_pipe"))
    assert source.length_s is None
    for _ in range(2):
        seen = []
        with pytest.raises(SourceFault, match=r"^'the camera' has ended\.$"):
            for frame in source.frames():
                seen.append(frame.index)
        assert seen == [0, 1, 2, 3]


def test_the_formats_are_there() -> None:
    assert {"rtsp", "mpjpeg"} <= av.formats_available and "video4linux2,v4l2" in av.formats_available


def test_a_host_that_nobody_knows_is_reported() -> None:
    with pytest.raises(RedlineError, match=r"cannot be opened: unknown host 'no\.such\.host\.invalid'\.$"):
        open_network("http://no.such.host.invalid/x")


@pytest.mark.parametrize(
    ("waits_s", "is_over"),
    [((0.004,), False), ((0.004, 0.004), True), ((0.01, 0.003, 0.01), False), ((0.01, 0.0, 0.01, 0.01, 0.0), True)],
)
def test_the_backlog_ends_after_two_waits_in_a_row(waits_s: tuple[float, ...], is_over: bool) -> None:
    passed_over = Backlog()
    for waited_s in waits_s:
        passed_over.read(waited_s)
    assert passed_over.is_over is is_over


@pytest.mark.parametrize(("seconds", "is_over"), [(3.0, False), (3.1, True)])
def test_the_backlog_ends_after_three_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float, is_over: bool) -> None:
    now_s = [100.0]
    monkeypatch.setattr(live_input.time, "monotonic", lambda: now_s[0])
    passed_over = Backlog()
    now_s[0] += seconds
    assert passed_over.is_over is is_over
