"""Frames overlap only for files, and come out in the same order."""

import threading
import time
from collections import deque

import pytest
import torch
from torch import Tensor

from patience import PATIENCE_S
from redline.stream.frames import Frame
from redline.stream.pipeline import Pipeline
from stream.doubles import Kept, ScriptedSource


class Deep:
    """Finishes frames as late as possible, and records how many were in flight."""

    copies_s, max_in_flight = (0.25, 0.5), 2

    def __init__(self) -> None:
        self.begun: deque[Frame] = deque()
        self.deepest, self.sizes = 0, []

    def prepare(self, height: int, width: int) -> None:
        assert not self.begun, "a frame of another size is still under way"
        self.sizes.append((height, width))

    def begin(self, frame: Frame) -> None:
        # Long enough for the next frame to come.
        time.sleep(2e-3)
        self.begun.append(frame)
        self.deepest = max(self.deepest, len(self.begun))

    def is_done(self) -> bool:
        return True

    def finish(self) -> Tensor:
        return 255 - self.begun.popleft().pixels

    def __call__(self, frame: Frame) -> Tensor:
        self.begin(frame)
        return self.finish()


@pytest.mark.parametrize("live", [True, False])
def test_files_overlap_and_live_frames_do_not(live: bool) -> None:
    transform, sink = Deep(), Kept()
    source = ScriptedSource([(4, 6)] * 5 + [(3, 3)] * 4, live=live)
    if live:
        shown = threading.Semaphore(0)
        sink._extra = lambda frame: shown.release()
        source.wait_for = lambda: shown.acquire(timeout=PATIENCE_S)
    outcome = Pipeline(source, transform, sink).run()
    assert sink.indices == list(range(9)) and transform.sizes == [(4, 6), (3, 3)]
    assert transform.deepest == (1 if live else 2)
    assert all(torch.equal(frame.pixels, torch.full_like(frame.pixels, 255 - frame.index)) for frame in sink.frames)
    assert outcome.report.stages["copy_in"].p50_s == 0.25


def test_a_frame_does_not_wait_for_the_next_one() -> None:
    """A file whose next frame comes when the last one was shown."""
    sink, source = Kept(), ScriptedSource([(4, 6)] * 4, live=False)
    shown, in_time = threading.Semaphore(0), []
    sink._extra = lambda frame: shown.release()
    source.wait_for = lambda: in_time.append(shown.acquire(timeout=PATIENCE_S))
    Pipeline(source, Deep(), sink).run()
    assert in_time == [True] * 4 and sink.indices == [0, 1, 2, 3]


def test_a_frame_that_comes_while_another_is_in_flight_is_begun_at_once() -> None:
    """A file that gives each frame when the one before has begun, to a device that is done with none before the next
    has begun too."""
    has_begun = threading.Semaphore(0)

    class Slow(Deep):
        def begin(self, frame: Frame) -> None:
            super().begin(frame)
            has_begun.release()

        def is_done(self) -> bool:
            return False

        def finish(self) -> Tensor:
            assert len(self.begun) == 2 or self.begun[0].index == 5
            return super().finish()

    transform, sink, source = Slow(), Kept(), ScriptedSource([(4, 6)] * 6, live=False)

    def wait() -> None:
        # The pipeline is given the time to lose its patience.
        assert has_begun.acquire(timeout=PATIENCE_S)
        time.sleep(5e-3)

    source.wait_for = wait
    Pipeline(source, transform, sink).run()
    assert sink.indices == list(range(6)) and transform.deepest == 2


def test_a_frame_that_is_done_is_passed_through_though_none_came_meanwhile() -> None:
    """A file whose next frame comes when the last one was shown, on a slow device."""
    looks = list[int]()

    class Slow(Deep):
        def begin(self, frame: Frame) -> None:
            super().begin(frame)
            looks.append(0)

        def is_done(self) -> bool:
            looks[-1] += 1
            return looks[-1] > 5

        def finish(self) -> Tensor:
            assert looks[-1] == 6, "it was waited for, and no longer than that"
            return super().finish()

    sink, source = Kept(), ScriptedSource([(4, 6)] * 4, live=False)
    shown, in_time = threading.Semaphore(0), []
    sink._extra = lambda frame: shown.release()
    source.wait_for = lambda: in_time.append(shown.acquire(timeout=PATIENCE_S))
    Pipeline(source, Slow(), sink).run()
    assert in_time == [True] * 4 and sink.indices == [0, 1, 2, 3] and looks == [6] * 4
