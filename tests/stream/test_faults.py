"""An error in any thread ends all threads, is raised once, and leaves no unfinished file."""

import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.pipeline import Backoff, Limits, Pipeline
from redline.stream.sinks import NullSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.wrappers import Paced
from stream.clocks import ManualClock
from stream.doubles import Identity, Kept, Noted, ScriptedSource, fault

pytestmark = pytest.mark.timeout(HANGS_S)
QUIET = Backoff(first_s=0.5, factor=2, longest_s=3)


def in_step(source: ScriptedSource, sink: Kept) -> None:
    """Makes the source wait until its last frame was shown."""
    shown = threading.Semaphore(0)
    sink._extra = lambda frame: shown.release()
    source.wait_for = lambda: shown.acquire(timeout=PATIENCE_S)


def test_a_live_source_is_connected_again_ever_more_slowly() -> None:
    clock, sink, told = ManualClock(), Kept(), []
    size = (3, 4)
    source = ScriptedSource(
        [size, size, fault()],
        [fault()],
        [fault()],
        [fault()],
        [fault()],
        [size, fault("the line is cut.")],
        [size, size],
        live=True,
        clock=clock,
    )
    in_step(source, sink)
    backoff = replace(QUIET, settled_s=0)
    outcome = Pipeline(source, Noted(), sink, clock=clock, backoff=backoff, log=told.append).run()
    assert clock.waits == [0.5, 1.0, 2.0, 3.0, 3.0, 0.5]
    assert outcome.faults == 6 and outcome.complete and source.let_go == 7
    assert sink.indices == [0, 1, 2, 3, 4]
    # 9.5 s went by without a frame, then 0.5 s: the film shows it so, and steps of 0.1 s otherwise.
    assert [float(frame.time_s) for frame in sink.frames] == pytest.approx([0, 0.1, 9.6, 10.1, 10.2])
    assert told[0] == "the camera is gone. Trying again in 0.5 s." and told[-1].startswith("the line is cut.")


def test_a_source_that_breaks_off_again_soon_is_waited_for_ever_longer() -> None:
    clock, sink, size = ManualClock(), Kept(), (2, 2)
    source = ScriptedSource(
        [size, fault()], [size, size, fault()], [size, fault()], [size] * 4 + [fault()], [size], live=True, clock=clock
    )
    in_step(source, sink)
    shown = source.wait_for
    # Only the fourth connection lasts for two seconds.
    source.wait_for = lambda: (shown(), clock.pass_s(0.7))
    Pipeline(source, Noted(), sink, clock=clock, backoff=QUIET).run()
    assert clock.waits == [0.5, 1.0, 2.0, 0.5]


def test_times_rise_across_a_fault_that_takes_no_time() -> None:
    clock, sink = ManualClock(), Kept()
    source = ScriptedSource([(2, 2)] * 3 + [fault()], [(2, 2)] * 2, live=True, clock=clock)
    in_step(source, sink)
    Pipeline(source, Noted(), sink, clock=clock, backoff=Backoff(0, 1, 0)).run()
    assert [frame.pts for frame in sink.frames] == [0, 1, 2, 3, 4]


def test_stopping_ends_the_wait_for_a_source() -> None:
    pipeline = Pipeline(
        ScriptedSource([(2, 2), fault()], live=True), Identity(), NullSink(), backoff=Backoff(3600, 1, 3600)
    )
    timer = threading.Timer(0.05, pipeline.stop)
    timer.start()
    assert not pipeline.run().complete
    timer.join()


def test_a_fault_of_a_file_ends_it_and_leaves_no_video(tmp_path: Path) -> None:
    source = ScriptedSource([(16, 16)] * 5 + [fault("the file is damaged.")], live=False)
    with pytest.raises(RedlineError, match=r"^the file is damaged\.$"):
        Pipeline(source, Identity(), VideoFileSink(tmp_path / "a.mp4", Fraction(10))).run()
    assert list(tmp_path.iterdir()) == [] and source.let_go == 1


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("place", ["source", "transform", "sink", "prepare", "close"])
def test_an_error_in_any_thread_ends_all_and_is_raised(place: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Exception):
        pass

    def breaks(*_: object) -> None:
        raise Broken(place)

    source = ScriptedSource([(2, 2)] * 4 + ([Broken(place)] if place == "source" else [(2, 2)] * 200), live=live)
    source.wait_for = lambda: time.sleep(1e-3)
    transform, sink = Noted(breaks if place == "transform" else lambda _: None), Kept()
    if place == "sink":
        sink._extra = breaks
    if place == "prepare":
        monkeypatch.setattr(transform, "prepare", breaks)
    if place == "close":
        monkeypatch.setattr(sink, "close", breaks)
    with pytest.raises(Broken, match=place):
        Pipeline(source, transform, sink).run()
    assert source.let_go == (0 if place == "prepare" else 1)
    if place != "close":
        assert sink.ends == ["stopped" if live and place != "sink" else "abandoned"]


def test_ctrl_c_keeps_what_was_recorded_live(tmp_path: Path) -> None:
    def interrupt(frame: object) -> None:
        if len(transform.seen) == 6:
            raise KeyboardInterrupt

    transform = Noted(interrupt)
    source = Paced(SyntheticClip(16, 16, count=None, rate=Fraction(200)))
    with pytest.raises(KeyboardInterrupt):
        Pipeline(source, transform, VideoFileSink(tmp_path / "a.mp4", Fraction(200))).run()
    assert 1 <= len(list(VideoFile(tmp_path / "a.mp4").frames())) <= 5


@pytest.mark.parametrize("live", [True, False])
def test_a_sink_that_hangs_is_reported_and_does_not_hang_the_rest(live: bool) -> None:
    released = threading.Event()
    sink = Kept(lambda frame: released.wait(PATIENCE_S))
    clip = SyntheticClip(4, 4, count=None, rate=Fraction(500))
    source = Paced(clip) if live else clip
    began = time.monotonic()
    try:
        with pytest.raises(RedlineError, match=r"^'kept' is hung: one frame took over 0\.1 s to write\.$"):
            Pipeline(source, Identity(), sink, limits=Limits(sink_s=0.1)).run()
        assert time.monotonic() - began < PATIENCE_S / 2
    finally:
        released.set()


def test_a_sink_that_hangs_at_the_end_is_reported() -> None:
    released = threading.Event()
    sink = Kept(lambda frame: released.wait(PATIENCE_S) if frame.index == 2 else None)
    try:
        with pytest.raises(RedlineError, match=r"is hung"):
            Pipeline(SyntheticClip(4, 4, count=3), Identity(), sink, limits=Limits(sink_s=0.1)).run()
    finally:
        released.set()


def test_a_source_that_hangs_is_reported() -> None:
    released = threading.Event()
    source = ScriptedSource([(2, 2)] * 9, live=True)
    source.wait_for = lambda: released.wait(PATIENCE_S)
    transform = Noted(lambda frame: pipeline.stop())
    pipeline = Pipeline(source, transform, NullSink(), limits=Limits(source_s=0.1))
    try:
        with pytest.raises(RedlineError, match=r"^the source 'scripted' did not stop within 0\.1 s\.$"):
            pipeline.run()
    finally:
        released.set()


@pytest.mark.parametrize("live", [True, False])
def test_a_video_refuses_another_size_and_a_live_recording_is_kept(tmp_path: Path, live: bool) -> None:
    source = ScriptedSource([(16, 20)] * 3 + [(6, 8)] * 3, live=live)
    taken = threading.Semaphore(0)
    # The first three are all taken; nobody says so of those that are refused.
    source.wait_for = lambda: taken.acquire(timeout=PATIENCE_S if len(transform.seen) < 3 else 0.1)
    transform = Noted(lambda frame: taken.release())
    said = r"^the frame size changes to 8×6, which 'a\.mp4' does not support: give --size 20x16\.$"
    with pytest.raises(RedlineError, match=said):
        Pipeline(source, transform, VideoFileSink(tmp_path / "a.mp4", Fraction(10))).run()
    left = [path.name for path in tmp_path.iterdir()]
    assert left == (["a.mp4"] if live else [])
    if live:
        assert all(frame.height == 16 for frame in VideoFile(tmp_path / "a.mp4").frames())


def test_a_size_that_the_transform_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, sink = Noted(), Kept()

    def refuse(height: int, width: int) -> None:
        if height != 16:
            raise RedlineError(f"the model takes no pictures of {width}×{height}.")

    monkeypatch.setattr(transform, "prepare", refuse)
    with pytest.raises(RedlineError, match=r"^the model takes no pictures of 9×7\.$"):
        Pipeline(ScriptedSource([(16, 16), (7, 9)], live=False), transform, sink).run()
    assert sink.ends == ["abandoned"]


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4, 4), torch.zeros(4, 4, dtype=torch.uint8), None])
def test_a_transform_that_gives_no_pixels_is_reported(wrong: object) -> None:
    class Wrong(Identity):
        def __call__(self, frame):
            return wrong

    with pytest.raises(RedlineError, match=r"^the transform returned .*, not uint8 pixels \(H, W, 3\) on the CPU\.$"):
        Pipeline(SyntheticClip(4, 4, count=2), Wrong(), NullSink()).run()


def test_a_soak_of_faults_ends_whole_and_leaks_nothing() -> None:
    size = (6, 5)
    connections = [[size] * 7 + [fault()] for _ in range(40)] + [[size] * 3]
    clock, sink = ManualClock(), Kept()
    source = ScriptedSource(*connections, live=True, clock=clock)
    in_step(source, sink)
    outcome = Pipeline(source, Noted(), sink, clock=clock).run()
    assert outcome.faults == 40 and sink.indices == list(range(283)) and source.let_go == 41
    times = [frame.time_s for frame in sink.frames]
    assert times == sorted(set(times)) and outcome.report.drops == {}
