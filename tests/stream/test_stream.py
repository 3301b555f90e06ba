"""A whole stream: what its page is told of the device is what the terminal is told."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from patience import HANGS_S
from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.models.lsd import save_lsd
from redline.stream import stream as sessions
from redline.stream.endpoints import EndpointOptions
from redline.stream.metrics_file import check_output_path
from redline.stream.monitor import Sample
from redline.stream.stream import Request, Session
from stream.small_models import small_lsd

pytestmark = pytest.mark.timeout(HANGS_S)


def test_the_page_is_told_the_device_and_how_much_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_lsd(small_lsd(), tmp_path / "small.safetensors", about={})
    given: list[EndpointOptions] = []
    open_endpoints = sessions.open_endpoints

    def noted(source: str, sink: str, wishes: EndpointOptions, *rest: Any) -> Any:
        given.append(wishes)
        return open_endpoints(source, sink, wishes, *rest)

    monkeypatch.setattr(sessions, "open_endpoints", noted)
    weights, live = tmp_path / "small.safetensors", EndpointOptions(live=True)
    session = Session(Request("synthetic:16x16,0.4", "null", weights, plan=Plan.parse("eager"), wishes=live))
    (wishes,) = given
    assert wishes.device == session.device and wishes.busy_share() is None
    samples: list[Sample] = []
    result = session.run(samples.append)
    assert wishes.busy_share() == samples[-1].busy_share > 0
    assert result.about.device_type == session.device.type


def test_a_page_has_a_slider_for_every_number_of_control_that_was_given(tmp_path: Path) -> None:
    pytest.importorskip("aiortc")
    save_lsd(small_lsd(), tmp_path / "small.safetensors", about={})
    for control in ((), (0.5,), (0.5, 0.25, 1.0)):
        weights = tmp_path / "small.safetensors"
        session = Session(Request("synthetic:16x16", "browser:0", weights, plan=Plan.parse("eager"), control=control))
        session.places.close()
        session.places.source.close()
        assert len(session.settings.now().control) == max(2, len(control))


def test_what_is_to_be_known_is_said_before_it_starts(tmp_path: Path) -> None:
    save_lsd(small_lsd(), tmp_path / "small.safetensors", about={})
    said: list[str] = []
    request = Request("synthetic:16x16,0.2", "null", tmp_path / "small.safetensors", plan=Plan.parse("eager"))
    session = Session(request, said.append)
    session.places.notes = ("the sound is lost.",)
    session.run()
    assert said == ["the sound is lost."]


@pytest.mark.parametrize("outlives", [True, False])
def test_a_terminal_that_is_closed_ends_the_stream_as_ctrl_c_does(outlives: bool) -> None:
    """A shell says so too, after the kernel; what was started to outlive its terminal goes on."""
    wanted, met = threading.Event(), []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if outlives else lambda *_: met.append("not heard"))
    try:
        with sessions._stopped_by_signals(wanted):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
        assert wanted.is_set() != outlives and not met
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("written", ["metrics", "report"])
@pytest.mark.parametrize("other", ["source", "sink", "model", "changes"])
def test_figures_and_page_take_no_other_files_place(written: str, other: str, linked: bool, tmp_path: Path) -> None:
    place = tmp_path / "one.mp4"
    place.write_bytes(b"what is there")
    same = tmp_path / "two.mp4"
    if linked:
        same.hardlink_to(place)
    given = {"source": "synthetic", "sink": "null", other: str(place)}
    if other == "model":
        given["model"] = place
    with pytest.raises(RedlineError, match=r"cannot write .*: it is the (source|output|model|list of changes)\.$"):
        Session(Request(**given, **{written: same if linked else place}))
    assert place.read_bytes() == b"what is there"


def test_figures_and_page_are_two_files(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=r"cannot write .*: it is the file of figures\.$"):
        Session(Request("synthetic", "null", metrics=tmp_path / "x", report=tmp_path / "x"))


def test_an_address_may_be_longer_than_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "figures.jsonl").write_text("old")
    check_output_path(tmp_path / "figures.jsonl", {"source": f"rtsp://camera/?token={'x' * 5000}"})
