"""Names of sources and outputs open the right kind, and unknown ones list the choices."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RedlineError
from redline.stream.choices import STREAM_SINKS, STREAM_SOURCES
from redline.stream.endpoints import EndpointOptions, open_endpoints, open_sink, open_source
from redline.stream.frame_model import ModelControls
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sinks import NullSink
from redline.stream.sinks.image_folder import ImageFolderSink
from redline.stream.sinks.mjpeg import MjpegSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.image_folder import ImageFolder
from redline.stream.sources.live_input import Address, LiveInput
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.wrappers import Paced, Resized
from upscale.video.clips import make_clip


@pytest.mark.parametrize(
    ("text", "size", "rate", "frames"),
    [
        ("synthetic:40x30@10,0.5", (30, 40), Fraction(10), 5),
        ("synthetic:40x30,0.2", (30, 40), Fraction(25), 5),
        ("synthetic:@12.5,0.4", (256, 256), Fraction(25, 2), 5),
        ("synthetic:,0.2", (256, 256), Fraction(25), 5),
    ],
)
def test_synthetic_clips(text: str, size: tuple[int, int], rate: Fraction, frames: int) -> None:
    source = open_source(text)
    assert isinstance(source, SyntheticClip) and not source.is_live
    assert ((source.height, source.width), source.rate) == (size, rate)
    assert len(list(source.frames())) == frames


def test_a_test_clip_without_a_length_never_ends() -> None:
    source = open_source("synthetic")
    frames = source.frames()
    assert [next(frames).index for _ in range(300)][-1] == 299
    source.close()


def test_videos_and_folders(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=3, size=(48, 32))
    folder = tmp_path / "pictures"
    sink = open_sink(f"{folder}/", open_source("synthetic"))
    assert isinstance(sink, ImageFolderSink)
    for frame in SyntheticClip(9, 7, count=2).frames():
        sink.write(frame)
    assert isinstance(open_source(str(folder)), ImageFolder)
    film = open_source(str(tmp_path / "a.mp4"))
    assert isinstance(film, VideoFile) and not film.is_live
    live = open_source(str(tmp_path / "a.mp4"), EndpointOptions(size=(20, 30), live=True))
    assert live.is_live and (live.height, live.width, live.rate) == (20, 30, 25)
    assert {frame.pixels.shape for frame in live.frames()} == {(20, 30, 3)}
    assert isinstance(live, Resized) and isinstance(live.inner, Paced)
    assert next(live.inner.inner.frames()).pixels.shape == (20, 30, 3), "scaled on the way to RGB"
    assert isinstance(open_sink(str(tmp_path / "b.mkv"), film), VideoFileSink)
    for source in (film, open_source(str(tmp_path / "a.mp4"), EndpointOptions(size=(20, 30), live=True))):
        with pytest.raises(RedlineError, match=r"cannot write .*: it is the source\.$"):
            open_sink(str(tmp_path / "a.mp4"), source)


@pytest.mark.parametrize("live", [True, False])
def test_a_recording_is_live_where_its_source_is(tmp_path: Path, live: bool) -> None:
    make_clip(tmp_path / "a.mp4", frames=3)
    for text in ("synthetic:8x8", str(tmp_path / "a.mp4")):
        sink = open_sink(str(tmp_path / "b.mp4"), open_source(text, EndpointOptions(live=live)))
        assert isinstance(sink, VideoFileSink) and sink._is_live == live


@pytest.mark.parametrize(("rotation", "aspect"), [(None, Fraction(16, 15)), (90, Fraction(15, 16))])
def test_pixels_stay_as_wide_as_they_were(tmp_path: Path, rotation: int | None, aspect: Fraction) -> None:
    make_clip(tmp_path / "a.mp4", frames=3, pixel_aspect=Fraction(16, 15), rotation=rotation)
    camera = LiveInput(Address(f"file:{tmp_path / 'a.mp4'}", "'camera'"))
    for name, source, expected in (
        ("b.mp4", open_source(str(tmp_path / "a.mp4")), aspect),
        ("c.mkv", open_source(str(tmp_path / "a.mp4"), EndpointOptions(live=True)), aspect),
        ("d.mp4", camera, aspect),
        ("e.mp4", open_source(str(tmp_path / "a.mp4"), EndpointOptions(size=(20, 30))), 1),
    ):
        sink = open_sink(str(tmp_path / name), source)
        for frame in source.frames():
            sink.write(frame)
        sink.close()
        assert VideoFile(tmp_path / name).pixel_aspect == expected, name


def test_a_live_clip_is_paced() -> None:
    source = open_source("synthetic:8x8", EndpointOptions(live=True))
    assert isinstance(source, Paced) and source.is_live


def test_other_sinks() -> None:
    source = open_source("synthetic")
    assert isinstance(open_sink("null", source), NullSink)
    sink = open_sink("mjpeg:0", source)
    assert isinstance(sink, MjpegSink) and sink.url.startswith("http://127.0.0.1:")
    sink.close()
    with pytest.raises(RedlineError, match=r"give a --key"):
        open_sink("mjpeg:0.0.0.0:0", source)
    sink = open_sink("mjpeg:0.0.0.0:0", source, EndpointOptions(key="k" * 12))
    sink.close()


@pytest.mark.parametrize("text", ["wbecam", "cam", "", "ftp://host/a"])
def test_unknown_sources_are_answered_with_the_choices(text: str) -> None:
    with pytest.raises(RedlineError) as caught:
        open_source(text)
    assert str(caught.value) == f"unknown source {text!r}; use one of: {STREAM_SOURCES}."


@pytest.mark.parametrize("text", ["nul", "film.avi", "", "rtsp://host"])
def test_unknown_sinks_are_answered_with_the_choices(text: str) -> None:
    with pytest.raises(RedlineError) as caught:
        open_sink(text, open_source("synthetic"))
    assert str(caught.value) == f"unknown output {text!r}; use one of: {STREAM_SINKS}."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("synthetic:big", "invalid test clip"),
        ("synthetic:64x64@30,0", "duration must be above 0"),
        ("synthetic:0x5", "must be above 0"),
        ("webcam:front", "write its number"),
        ("webcam:0x720", "must be above 0"),
        ("webcam:@0", "must be above 0"),
        ("/dev/video77", "there is no camera '/dev/video77'"),
        ("none.mp4", "does not exist"),
    ],
)
def test_invalid_source_names_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        open_source(text)


@pytest.mark.parametrize(
    ("sink", "sentence"),
    [
        ("mjpeg:http", "invalid port 'http': write a port as in mjpeg:8182 or mjpeg:HOST:PORT."),
        ("browser:abc", "invalid port 'abc': write a port as in browser:8181 or browser:HOST:PORT."),
    ],
)
def test_a_bad_port_is_reported(sink: str, sentence: str) -> None:
    with pytest.raises(RedlineError) as caught:
        open_endpoints("synthetic", sink, EndpointOptions(), LiveSettings(), Latency())
    assert str(caught.value) == sentence


@pytest.mark.parametrize("sink", ["mjpeg:0", "window", "virtual-camera", "browser"])
def test_what_is_looked_at_comes_at_the_pace_of_its_source(
    sink: str, pages: list["FakePage"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WindowSink", "VirtualCameraSink"):
        monkeypatch.setattr(f"redline.stream.endpoints.{name}", lambda *_: NullSink())
    for options in (EndpointOptions(), EndpointOptions(size=(8, 8))):
        places = open_endpoints("synthetic:16x16,1", sink, options, LiveSettings(), Latency())
        assert places.source.is_live and _inner(places.source, Paced)
        places.sink.close()
        assert bool(places.notes) == (sink == "browser")
    assert all(page.waits for page in pages)
    places = open_endpoints("synthetic:16x16,1", "null", EndpointOptions(), LiveSettings(), Latency())
    assert not places.source.is_live and not places.notes


def test_a_camera_does_not_wait_for_a_page(pages: list["FakePage"], monkeypatch: pytest.MonkeyPatch) -> None:
    camera = SyntheticClip(8, 8)
    camera.is_live = True
    monkeypatch.setattr("redline.stream.endpoints.open_webcam", lambda number, mode, drop, size: camera)
    places = open_endpoints("webcam", "browser", EndpointOptions(), LiveSettings(), Latency())
    assert not pages[-1].waits and places.source is camera and places.notes == ()


@pytest.mark.parametrize("sound", ["aac", None])
def test_audio_that_is_lost_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: str | None) -> None:
    make_clip(tmp_path / "a.mkv", frames=3, sound=sound)
    camera = LiveInput(Address(f"file:{tmp_path / 'a.mkv'}", "'rtsp://camera'"))
    monkeypatch.setattr("redline.stream.endpoints.open_network", lambda url, drop, size: Paced(camera, drop=drop))
    for sink in (str(tmp_path / "b.mp4"), "null"):
        places = open_endpoints("rtsp://camera", sink, EndpointOptions(size=(8, 8)), LiveSettings(), Latency())
        said = "the audio of 'rtsp://camera' is not recorded: only local video files keep their audio."
        assert places.notes == ((said,) if sound and sink != "null" else ())
    camera.close()


def _inner(source: object, kind: type) -> bool:
    return isinstance(source, kind) or isinstance(getattr(source, "inner", None), kind)


def test_an_invalid_output_closes_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(SyntheticClip, "close", lambda self: closed.append(True))
    with pytest.raises(RedlineError, match="unknown output"):
        open_endpoints("synthetic", "nowhere", EndpointOptions(), LiveSettings(), Latency())
    assert closed == [True]
    places = open_endpoints("synthetic", "mjpeg:0", EndpointOptions(), LiveSettings(), Latency())
    assert [url.rpartition("/")[2] for url in places.urls] == ["stream.mjpeg", ""]
    places.sink.close()


class FakePage:
    """The part of the browser page that endpoints use."""

    def __init__(self, host: str, port: int, key: str | None, **options: Any) -> None:
        self.options = {"host": host, "port": port, "key": key, **options}
        self.urls, self.closed = (f"http://{host}:{port}/",), 0
        self.source = SyntheticClip(8, 8, count=2) if options["as_source"] else None
        self.sink = NullSink() if options["as_sink"] else None
        self.tapped: list[object] = []

    def preview(self, source: object, waits: bool = False) -> object:
        self.tapped.append(source)
        self.waits = waits
        return source

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[FakePage]:
    made: list[FakePage] = []

    def serve(*args: Any, **options: Any) -> FakePage:
        made.append(FakePage(*args, **options))
        return made[-1]

    monkeypatch.setattr("redline.stream.browser.serve", serve)
    return made


def test_a_browser_at_either_end_or_both(pages: list[FakePage]) -> None:
    share = {"device": torch.device("cuda:1"), "busy_share": lambda: 0.5}
    options = EndpointOptions(size=(24, 40), key="k", controls=ModelControls(4, ("a",)), **share)
    both = open_endpoints("browser:9000", "browser", options, LiveSettings(), Latency())
    page = pages[-1]
    assert (both.source, both.sink, both.urls) == (page.source, page.sink, ("http://127.0.0.1:9000/",))
    assert (
        page.options["size"] == (24, 40)
        and page.options["key"] == "k"
        and page.options["controls"] == ModelControls(4, ("a",))
    )
    assert {name: page.options[name] for name in share} == share
    both.close()
    assert page.closed == 1
    shown = open_endpoints("synthetic:16x16", "browser:0.0.0.0:0", EndpointOptions(), LiveSettings(), Latency())
    assert pages[-1].tapped == [shown.source] and pages[-1].options["host"] == "0.0.0.0"
    given = open_endpoints("browser", "null", EndpointOptions(), LiveSettings(), Latency())
    assert given.source is pages[-1].source and isinstance(given.sink, NullSink)
    with pytest.raises(RedlineError, match="unknown output"):
        open_endpoints("browser", "nowhere", EndpointOptions(), LiveSettings(), Latency())
    assert pages[-1].closed == 1


def test_a_page_has_one_address(pages: list[FakePage]) -> None:
    for source, sink in (("browser:9000", "browser"), ("browser", "browser:9000"), ("browser:9000", "browser:9000")):
        assert open_endpoints(source, sink, EndpointOptions(), LiveSettings(), Latency()).urls == (
            "http://127.0.0.1:9000/",
        )
    said = r"^source 'browser:9000' and output 'browser:9001' must be the same browser page: "
    with pytest.raises(RedlineError, match=said):
        open_endpoints("browser:9000", "browser:9001", EndpointOptions(), LiveSettings(), Latency())


@pytest.mark.parametrize(
    ("text", "number", "options"),
    [
        ("webcam", 0, {}),
        ("webcam:2", 2, {}),
        ("webcam:1280x720", 0, {"video_size": "1280x720"}),
        ("webcam:1:1280x720@30,mjpeg", 1, {"video_size": "1280x720", "framerate": "30", "input_format": "mjpeg"}),
        ("webcam:@12.5", 0, {"framerate": "25/2"}),
    ],
)
def test_a_camera_is_asked_for_a_size_and_a_rate(
    monkeypatch: pytest.MonkeyPatch, text: str, number: int, options: dict[str, str]
) -> None:
    monkeypatch.setattr(
        "redline.stream.endpoints.open_webcam", lambda number, mode, drop, size: (number, mode.options, size)
    )
    assert open_source(text) == (number, options, None)


def test_a_folder_has_a_rate(tmp_path: Path) -> None:
    for name in ("a", "b@9"):
        sink = ImageFolderSink(tmp_path / name)
        for frame in SyntheticClip(4, 4, count=2).frames():
            sink.write(frame)
    assert open_source(f"{tmp_path}/a").rate == 25 and open_source(f"{tmp_path}/a/@12.5").rate == Fraction(25, 2)
    assert open_source(f"{tmp_path}/b@9").rate == 25, "a folder's own name is first"
    with pytest.raises(RedlineError, match=r"rate must be above 0"):
        open_source(f"{tmp_path}/a@0")


def test_a_certificate_is_for_a_page(pages: list[FakePage]) -> None:
    options = EndpointOptions(certificate=Path("page.pem"))
    open_endpoints("synthetic:16x16", "browser", options, LiveSettings(), Latency())
    assert pages[-1].options["certificate"] == Path("page.pem")
    with pytest.raises(
        RedlineError, match=r"^--certificate needs a browser as source or output, and this stream has none\.$"
    ):
        open_endpoints("synthetic:16x16", "null", options, LiveSettings(), Latency())


def test_a_key_is_for_viewers() -> None:
    with pytest.raises(RedlineError, match=r"^--key needs an output that serves viewers, and this stream has none\.$"):
        open_endpoints("synthetic:16x16", "null", EndpointOptions(key="secret"), LiveSettings(), Latency())


def test_an_address_may_begin_with_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("redline.stream.endpoints.open_network", lambda url, drop, size: asked.append(url))
    open_source("HTTP://Host/A.mjpeg")
    open_source("Rtsp://host/live")
    assert asked == ["http://Host/A.mjpeg", "rtsp://host/live"]


def test_a_page_that_cannot_be_served_releases_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        raise RedlineError("the port is taken.")

    monkeypatch.setattr("redline.stream.browser.serve", refuse)
    monkeypatch.setattr(SyntheticClip, "close", lambda self: closed.append(self.name))
    with pytest.raises(RedlineError, match="port is taken"):
        open_endpoints("synthetic:16x16", "browser", EndpointOptions(), LiveSettings(), Latency())
    assert closed == ["test clip"]
