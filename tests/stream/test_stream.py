"""`redline.Stream`: whole streams, frame by frame, and what it refuses; its docstring runs as a test."""

import doctest
from pathlib import Path
from typing import Any

import pytest

import redline
from forked_python import ForkedPython
from patience import HANGS_S
from redline.errors import RedlineError
from redline.models.lsd import save_lsd
from redline.stream import stream as stream_module
from redline.stream.endpoints import EndpointOptions
from redline.stream.metrics_file import check_output_path
from redline.stream.monitor import Sample
from redline.stream.sources.video_file import VideoFile
from redline.stream.stream import Stream
from stream.small_models import small_lsd

pytestmark = pytest.mark.timeout(HANGS_S)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_lsd(small_lsd(), tmp_path / "small.safetensors", about={})
    return tmp_path / "small.safetensors"


def small(weights: Path, source: str, output: str | Path = "null", **options: Any) -> Stream:
    return Stream(source, output, model=weights, plan="eager", device="cpu", **options)


def test_the_examples_of_the_docstring_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(stream_module)
    assert results.attempted == 4 and not results.failed
    assert len(list(VideoFile(tmp_path / "restored.mp4").frames())) == 5


def test_the_result_names_the_output_and_writes_a_report(weights: Path, tmp_path: Path) -> None:
    samples: list[Sample] = []
    stream = small(weights, "synthetic:16x16,0.2", tmp_path / "out.mp4", metrics=tmp_path / "m.jsonl")
    result = stream.run(samples.append)
    assert result.frames == 5 and result.complete and not result.interrupted and result.output == tmp_path / "out.mp4"
    assert 0 < result.latency.p50_s <= result.latency.p99_s and not result.dropped and result.frames_per_s > 0
    result.write_report(tmp_path / "report.html")
    assert "5 frames" in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) >= len(samples) > 0


def test_iterating_gives_and_writes_every_frame(weights: Path, tmp_path: Path) -> None:
    with small(weights, "synthetic:16x16,0.2", tmp_path / "out.mkv") as stream:
        seen = []
        for frame in stream:
            seen.append(frame.settings.strength)
            stream.settings.change(strength=0.25)
    assert seen == [1.0, 0.25, 0.25, 0.25, 0.25]
    assert len(list(VideoFile(tmp_path / "out.mkv").frames())) == 5


def test_leaving_a_loop_keeps_the_frames_so_far(weights: Path, tmp_path: Path) -> None:
    with small(weights, "synthetic:16x16", tmp_path / "out.mkv") as stream:
        for frame in stream:
            if frame.index == 2:
                stream.stop()
    assert len(list(VideoFile(tmp_path / "out.mkv").frames())) == 3


def test_a_stream_that_is_closed_before_its_end_leaves_no_output(weights: Path, tmp_path: Path) -> None:
    stream = small(weights, "synthetic:16x16", tmp_path / "out.mkv")
    frames = iter(stream)
    for _ in range(60):  # the encoder holds the first frames back
        next(frames)
    stream.close()
    assert sorted(tmp_path.iterdir()) == [weights]


def test_stop_ends_a_running_stream(weights: Path) -> None:
    stream = small(weights, "synthetic:16x16@30", live=True)
    result = stream.run(lambda sample: stream.stop())
    assert result.interrupted and not result.complete and result.frames
    with pytest.raises(RedlineError, match=r"runs only once: create another one\.$"):
        stream.run()


def test_the_page_gets_the_device_and_its_utilization(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EndpointOptions] = []
    open_endpoints = stream_module.open_endpoints

    def noted(source: str, sink: str, options: EndpointOptions, *rest: Any) -> Any:
        given.append(options)
        return open_endpoints(source, sink, options, *rest)

    monkeypatch.setattr(stream_module, "open_endpoints", noted)
    stream = small(weights, "synthetic:16x16,0.4", live=True)
    (options,) = given
    assert options.device == stream.device and options.busy_share() is None
    samples: list[Sample] = []
    result = stream.run(samples.append)
    assert options.busy_share() == samples[-1].busy_share > 0
    assert result.info.device_type == stream.device.type


def test_the_page_has_a_slider_for_every_control_number(weights: Path) -> None:
    pytest.importorskip("aiortc")
    for control in ((), (0.5,), (0.5, 0.25, 1.0)):
        with small(weights, "synthetic:16x16", "browser:0", control=control) as stream:
            assert len(stream.settings.now().control) == max(2, len(control))


def test_notes_are_logged_before_the_stream_starts(weights: Path) -> None:
    logged: list[str] = []
    stream = small(weights, "synthetic:16x16,0.2", log=logged.append)
    stream._endpoints.notes = ("the audio is lost.",)
    stream.run()
    assert logged == ["the audio is lost."]


def test_stream_is_a_public_name() -> None:
    assert redline.Stream is Stream


# A hang-up that is not handled ends this process, and not the one that runs the tests.
HANG_UPS = """
import os, signal, threading
from redline.stream.stream import set_on_signals

for before in (signal.SIG_IGN, signal.SIG_DFL):
    signal.signal(signal.SIGHUP, before)
    stop = threading.Event()
    with set_on_signals(stop):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
    print(stop.is_set(), signal.getsignal(signal.SIGHUP) is before)
"""


def test_closing_the_terminal_ends_the_stream_unless_hang_ups_are_ignored(forked_python: ForkedPython) -> None:
    """A shell repeats the signal of the kernel."""
    done = forked_python.run(HANG_UPS)
    assert (done.returncode, done.stdout) == (0, "False True\nTrue True\n"), done.stderr


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("other", ["source", "output", "model", "changes"])
def test_metrics_do_not_overwrite_another_file_of_the_stream(other: str, linked: bool, tmp_path: Path) -> None:
    place = tmp_path / "one.mp4"
    place.write_bytes(b"what is there")
    same = tmp_path / "two.mp4"
    if linked:
        same.hardlink_to(place)
    options: dict[str, Any] = {"source": "synthetic", "output": "null", other: place}
    with pytest.raises(RedlineError, match=r"cannot write .*: it is the (source|output|model|list of changes)\.$"):
        Stream(**options, metrics=same if linked else place)
    assert place.read_bytes() == b"what is there"


def test_an_address_may_be_longer_than_a_file_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("old")
    check_output_path(tmp_path / "metrics.jsonl", {"source": f"rtsp://camera/?token={'x' * 5000}"})
