"""Sources that wrap another source: to scale its frames, play it at its own frame rate, or also show it on a page."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from PIL import Image

from redline.errors import RedlineError
from redline.stream.frames import Clock, Frame
from redline.stream.sources import LARGEST_PX, Source

SOURCE_LATE = "source late"
_LATE_S = 0.1
# If a source is always late, a frame is shown nevertheless after this many seconds without one.
_LONGEST_GAP_S = 0.5


class SourceWrapper(Source):
    """Base class of sources that change the frames of another source, `inner`."""

    def __init__(self, inner: Source) -> None:
        self.inner, self.name, self.is_live, self.rate = inner, inner.name, inner.is_live, inner.rate
        self.height, self.width = inner.height, inner.width

    def frames(self) -> Generator[Frame, None, None]:
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                yield self.change(frame)

    def change(self, frame: Frame) -> Frame:
        return frame

    def close(self) -> None:
        self.inner.close()


class Resized(SourceWrapper):
    """Scales frames to one size without cropping, so another aspect ratio distorts the image. Pixels become square."""

    def __init__(self, source: Source, height: int, width: int) -> None:
        check_size(height, width)
        super().__init__(source)
        self.height, self.width = height, width

    def change(self, frame: Frame) -> Frame:
        if (frame.height, frame.width) != (self.height, self.width):
            image = Image.fromarray(frame.pixels.numpy())
            scaled = image.resize((self.width, self.height), Image.Resampling.BICUBIC)
            frame = replace(frame, pixels=torch.from_numpy(np.array(scaled)))
        return replace(frame, pixel_aspect=Fraction(1))


def check_size(height: int, width: int) -> None:
    if not (1 <= height <= LARGEST_PX and 1 <= width <= LARGEST_PX):
        raise RedlineError(f"invalid size {width}×{height}: each side must have 1 to {LARGEST_PX} pixels.")


class Previewed(SourceWrapper):
    """Calls `preview` with every frame, so that the page shows the input as well. Nothing is read before `begin` is
    set."""

    def __init__(
        self, source: Source, preview: Callable[[Frame], object], begin: threading.Event | None = None
    ) -> None:
        super().__init__(source)
        self._preview, self._begin = preview, begin

    def frames(self) -> Generator[Frame, None, None]:
        if self._begin is not None:
            self._begin.wait()
        yield from super().frames()

    def change(self, frame: Frame) -> Frame:
        self._preview(frame)
        return frame

    def close(self) -> None:
        super().close()
        if self._begin is not None:
            self._begin.set()


class Paced(SourceWrapper):
    """Makes a source live: yields its frames at their presentation times, as a camera does.

    Times count from the first frame, so that one late frame does not delay the rest. The age of a late frame is
    measured from the time at which it was due, so that the latency shows that a source cannot keep up. A frame that is
    late by more than one frame time and a tenth of a second is dropped, unless no frame was shown in the last half
    second. `drop` is called with the cause for each dropped frame.
    """

    def __init__(
        self, source: Source, clock: Clock | None = None, drop: Callable[[str], None] = lambda cause: None
    ) -> None:
        super().__init__(source)
        self.is_live = True
        self._clock, self._drop = clock or Clock(), drop
        self._closed = threading.Event()

    def frames(self) -> Generator[Frame, None, None]:
        start_s: float | None = None
        first, shown_s = Fraction(0), 0.0
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if start_s is None:
                    start_s = shown_s = self._clock.now_s()
                    first = frame.time_s
                due_s = start_s + float(frame.time_s - first)
                if self._clock.wait(due_s - self._clock.now_s(), self._closed):
                    return
                now_s = self._clock.now_s()
                if now_s - due_s > 1 / self.rate + _LATE_S and now_s - shown_s < _LONGEST_GAP_S:
                    self._drop(SOURCE_LATE)
                    continue
                shown_s = now_s
                yield replace(frame, captured_s=min(now_s, due_s))

    def close(self) -> None:
        self._closed.set()
        super().close()
