"""Sources, transforms and sinks for tests, which misbehave on purpose and record their calls."""

import threading
import time
from collections.abc import Callable, Generator
from fractions import Fraction

import torch
from torch import Tensor

from redline.stream.frames import Frame
from redline.stream.sources import SourceFault


class ScriptedSource:
    """Follows a script at each connection: sizes of frames, or errors to raise."""

    name, rate = "scripted", Fraction(10)

    def __init__(self, *connections: list[tuple[int, int] | Exception], live: bool, clock: object = None) -> None:
        self._connections = list(connections)
        self._clock = clock
        self.is_live, self.let_go = live, 0
        sizes = [item for items in connections for item in items if isinstance(item, tuple)]
        self.height, self.width = sizes[0]
        self.wait_for: Callable[[], object] = lambda: None
        self.at_end: Callable[[], object] = lambda: None

    def frames(self) -> Generator[Frame, None, None]:
        script = self._connections.pop(0) if self._connections else []
        try:
            for index, item in enumerate(script):
                if isinstance(item, Exception):
                    raise item
                captured_s = self._clock.now_s() if self._clock else time.monotonic()
                pixels = torch.full((*item, 3), index, dtype=torch.uint8)
                yield Frame(pixels, index, index, Fraction(1, 10), captured_s, duration=1)
                self.wait_for()
            self.at_end()
        finally:
            self.let_go += 1

    def close(self) -> None:
        pass


def fault(text: str = "the camera is gone.") -> SourceFault:
    return SourceFault(text)


class PerFrame:
    """Base of transforms that compute one frame at a time, in `__call__`."""

    max_in_flight, copies_s = 1, (0.0, 0.0)
    _frame: Frame

    def begin(self, frame: Frame) -> None:
        self._frame = frame

    def is_done(self) -> bool:
        return True

    def finish(self) -> Tensor:
        return self(self._frame)

    def __call__(self, frame: Frame) -> Tensor:
        raise NotImplementedError


class Noted(PerFrame):
    """A transform that records sizes and frames, and calls `extra` for each frame."""

    def __init__(self, extra: Callable[[Frame], object] = lambda frame: None) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.seen: list[Frame] = []
        self._extra = extra

    def prepare(self, height: int, width: int) -> None:
        self.sizes.append((height, width))

    def __call__(self, frame: Frame) -> Tensor:
        self.seen.append(frame)
        self._extra(frame)
        return 255 - frame.pixels


class Identity(PerFrame):
    """A transform that returns its input, to measure the latency of the pipeline itself."""

    def prepare(self, height: int, width: int) -> None:
        pass

    def __call__(self, frame: Frame) -> Tensor:
        return frame.pixels


class Kept:
    """A sink that keeps frames, and calls `extra` for each."""

    name, takes_new_size = "kept", True

    def __init__(self, extra: Callable[[Frame], object] = lambda frame: None) -> None:
        self.frames: list[Frame] = []
        self.ends: list[str] = []
        self.threads: set[int] = set()
        self._extra = extra

    def write(self, frame: Frame) -> None:
        self.threads.add(threading.get_ident())
        self._extra(frame)
        self.frames.append(frame)

    def close(self, complete: bool = True) -> None:
        self.threads.add(threading.get_ident())
        self.ends.append("whole" if complete else "stopped")

    def abandon(self) -> None:
        self.threads.add(threading.get_ident())
        self.ends.append("abandoned")

    @property
    def indices(self) -> list[int]:
        return [frame.index for frame in self.frames]
