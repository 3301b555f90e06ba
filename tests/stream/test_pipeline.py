"""Files keep every frame in order, live sources their pace, and settings change between frames only."""

import itertools
import random
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.pipeline import COMPUTE_BUSY, SINK_BUSY, Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks import NullSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.wrappers import Paced
from stream.clocks import ManualClock
from stream.doubles import Identity, Kept, Noted, PerFrame, ScriptedSource
from upscale.video.clips import make_clip

pytestmark = pytest.mark.timeout(HANGS_S)


def nap(seed: int):
    chance = random.Random(seed)
    return lambda frame: time.sleep(chance.choice([0, 0, 0, 1e-3, 4e-3]))


@pytest.mark.parametrize("seed", range(4))
def test_a_file_loses_nothing_and_keeps_order(seed: int) -> None:
    clip, sink = SyntheticClip(9, 7, count=60, seed=seed), Kept(nap(seed))
    outcome = Pipeline(clip, Noted(nap(seed + 100)), sink).run()
    assert sink.indices == list(range(60)) and sink.ends == ["whole"] and len(sink.threads) == 1
    assert all(torch.equal(frame.pixels, 255 - clip.pixels(frame.index)) for frame in sink.frames)
    assert outcome.complete and outcome.report.frames == 60 and outcome.report.drops == {}


def test_a_video_goes_through_with_its_times_and_audio(tmp_path: Path) -> None:
    ticks = [0, 500, 512, 3000, 3001, 7000, 9000]
    make_clip(tmp_path / "in.mp4", pts=ticks, sound="aac")
    source = VideoFile(tmp_path / "in.mp4")
    sink = VideoFileSink(tmp_path / "out.mp4", source.rate, origin_s=source.origin_s, audio=source.path)
    Pipeline(source, Identity(), sink).run()
    made = VideoFile(tmp_path / "out.mp4")
    assert [frame.time_s for frame in made.frames()] == [Fraction(tick, 12800) for tick in ticks] and made.has_audio


def test_one_pixel_goes_through(tmp_path: Path) -> None:
    Pipeline(SyntheticClip(1, 1, count=3), Identity(), VideoFileSink(tmp_path / "a.mkv", Fraction(25))).run()
    assert [frame.pixels.shape for frame in VideoFile(tmp_path / "a.mkv").frames()] == [(1, 1, 3)] * 3


def test_a_live_source_is_paced_and_every_frame_is_shown_or_counted() -> None:
    sink = Kept(nap(1))
    source = Paced(SyntheticClip(5, 5, count=40, rate=Fraction(400)))
    drops = Pipeline(source, Noted(nap(2)), sink).run().report.drops
    assert sink.indices == sorted(set(sink.indices)) and sink.indices[-1] == 39
    assert len(sink.frames) + sum(drops.values()) == 40 and set(drops) <= {COMPUTE_BUSY, SINK_BUSY}


def test_a_slow_model_takes_the_newest_frame() -> None:
    source, sink = ScriptedSource([(3, 4)] * 30, live=True), Kept()
    all_given = threading.Event()
    source.at_end = all_given.set
    transform = Noted(lambda frame: all_given.wait(PATIENCE_S))
    drops = Pipeline(source, transform, sink).run().report.drops
    assert sink.indices[-1] == 29 and len(transform.seen) <= 2
    assert drops[COMPUTE_BUSY] == 30 - len(transform.seen)


def test_a_slow_sink_is_given_the_newest_frame() -> None:
    source = ScriptedSource([(3, 4)] * 30, live=True)
    taken, all_made = threading.Semaphore(0), threading.Event()
    source.wait_for = lambda: taken.acquire(timeout=PATIENCE_S)
    transform = Noted(lambda frame: taken.release())
    source.at_end = all_made.set
    sink = Kept(lambda frame: all_made.wait(PATIENCE_S))
    drops = Pipeline(source, transform, sink).run().report.drops
    assert len(transform.seen) == 30 and sink.indices[-1] == 29 and len(sink.frames) <= 3
    assert drops == {SINK_BUSY: 30 - len(sink.frames)}


def test_a_live_source_that_is_kept_up_with_loses_nothing() -> None:
    sink = Kept()
    source = ScriptedSource([(3, 4)] * 20, live=True)
    shown = threading.Semaphore(0)
    sink._extra = lambda frame: shown.release()
    source.wait_for = lambda: shown.acquire(timeout=PATIENCE_S)
    outcome = Pipeline(source, Noted(), sink).run()
    assert sink.indices == list(range(20)) and outcome.report.drops == {}


def test_little_is_held_before_a_slow_sink() -> None:
    transform = Noted()
    ahead: list[int] = []
    sink = Kept(lambda frame: (time.sleep(2e-3), ahead.append(len(transform.seen) - frame.index)))
    Pipeline(SyntheticClip(5, 5, count=40), transform, sink).run()
    assert max(ahead) <= 5 and len(sink.frames) == 40


def test_settings_change_between_frames_and_never_inside() -> None:
    settings = LiveSettings(Settings(steps=1, seed=1))
    ended, turns = threading.Event(), 0

    def turn() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            settings.change(steps=turns % 900 + 1, seed=turns % 900 + 1)
            time.sleep(0)

    def stay(_frame: object) -> None:
        """Waits until the settings were changed again, however late the other thread runs."""
        before, deadline = turns, time.monotonic() + PATIENCE_S
        while turns == before and time.monotonic() < deadline:
            time.sleep(1e-3)

    transform = Noted(stay)
    turner = threading.Thread(target=turn)
    turner.start()
    try:
        Pipeline(SyntheticClip(4, 4, count=40), transform, NullSink(), settings=settings).run()
    finally:
        ended.set()
        turner.join()
    seen = [frame.settings for frame in transform.seen]
    assert all(each.steps == each.seed for each in seen) and len(set(seen)) > 5


def test_a_change_is_in_force_with_the_next_frame() -> None:
    settings = LiveSettings()
    transform = Noted(lambda frame: settings.change(strength=0.9, control=[1, 2]) if frame.index == 4 else None)
    Pipeline(SyntheticClip(4, 4, count=9), transform, NullSink(), settings=settings).run()
    assert [frame.settings.strength for frame in transform.seen] == [0.5] * 5 + [0.9] * 4
    assert transform.seen[5].settings.control == (1.0, 2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"strength": 1.5},
        {"steps": 0},
        {"steps": 1.5},
        {"seed": -1},
        {"control": [float("nan")]},
        {"speed": 1},
        {"steps": "a"},
    ],
)
def test_an_invalid_setting_changes_nothing(changes: dict) -> None:
    settings = LiveSettings()
    with pytest.raises(RedlineError, match=r"\.$"):
        settings.change(**{"strength": 0.1, **changes})
    assert settings.now() == Settings()


def test_stages_add_up_to_the_latency() -> None:
    clock = ManualClock()

    class Timed(PerFrame):
        copies_s = (0.25, 0.5)

        def prepare(self, height: int, width: int) -> None:
            clock.pass_s(1000)

        def __call__(self, frame: Frame) -> Tensor:
            clock.pass_s(2)
            return frame.pixels

    given = itertools.count(1)

    def until_recorded() -> None:
        number = next(given)
        while pipeline.latency.report().frames < number:
            time.sleep(1e-3)

    source = ScriptedSource([(3, 4)] * 3, live=False, clock=clock)
    source.wait_for = until_recorded
    pipeline = Pipeline(source, Timed(), Kept(lambda frame: clock.pass_s(4)), clock=clock)
    report = pipeline.run().report
    assert report.frames == 3 and report.latency.most_s == pytest.approx(6) == report.latency.mean_s
    means = {stage: spread.mean_s for stage, spread in report.stages.items()}
    assert means == pytest.approx(
        {"capture": 0, "wait": 0, "copy_in": 0.25, "compute": 1.25, "copy_out": 0.5, "display": 4}
    )


def test_another_size_during_a_stream_is_prepared_for() -> None:
    transform, sink, told = Noted(), Kept(), []
    source = ScriptedSource([(4, 6), (4, 6), (8, 2), (4, 6)], live=False)
    Pipeline(source, transform, sink, log=told.append).run()
    assert transform.sizes == [(4, 6), (8, 2), (4, 6)] and [f.height for f in sink.frames] == [4, 4, 8, 4]
    assert told[0] == "the frame size changes from 6×4 to 2×8."


@pytest.mark.parametrize("live", [True, False])
def test_stopping_finishes_what_is_written(tmp_path: Path, live: bool) -> None:
    clip = SyntheticClip(16, 16, count=None, rate=Fraction(200))
    source = Paced(clip) if live else clip
    transform = Noted(lambda frame: pipeline.stop() if len(transform.seen) == 9 else None)
    pipeline = Pipeline(source, transform, VideoFileSink(tmp_path / "a.mp4", Fraction(200)))
    outcome = pipeline.run()
    assert not outcome.complete and outcome.report.frames + outcome.report.drops.get(SINK_BUSY, 0) >= 9
    assert len(list(VideoFile(tmp_path / "a.mp4").frames())) == outcome.report.frames
    assert len(list(tmp_path.iterdir())) == 1


def test_stopping_ends_a_long_wait_for_the_next_frame() -> None:
    sink = Kept(lambda frame: pipeline.stop())
    pipeline = Pipeline(Paced(SyntheticClip(4, 4, rate=Fraction(1, 3600))), Identity(), sink)
    assert pipeline.run().report.frames == 1 and sink.ends == ["stopped"]


def test_a_pipeline_runs_once() -> None:
    pipeline = Pipeline(SyntheticClip(4, 4, count=2), Identity(), NullSink())
    pipeline.stop()
    assert pipeline.run().report.frames == 0
    with pytest.raises(RedlineError, match=r"^a pipeline runs only once: create another one\.$"):
        pipeline.run()


def test_no_frame_of_a_file_is_read_before_there_is_room_for_it() -> None:
    """One frame is computed and one waits; a third would only age in the reader."""
    read: list[int] = []
    ahead: list[int] = []

    class Noticed(SyntheticClip):
        def pixels(self, index: int) -> Tensor:
            read.append(index)
            return super().pixels(index)

    class Slow(Identity):
        def __call__(self, frame: Frame) -> Tensor:
            time.sleep(0.03)  # long enough for the reader to come as far as it will
            ahead.append(read[-1] - frame.index)
            return super().__call__(frame)

    Pipeline(Noticed(8, 8, count=12), Slow(), NullSink()).run()
    assert max(ahead) == 1 and len(ahead) == 12
