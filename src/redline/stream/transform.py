"""What makes a new picture out of each frame; the pipeline knows no more of a model than this."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from redline.stream.frames import Frame


class Transform(Protocol):
    """Both are called in the thread that runs the pipeline, and in no other."""

    def prepare(self, height: int, width: int) -> None:
        """Before the first frame of this size: buffers, compilation, warm-up. A size that cannot be is refused with a
        `RedlineError`. Frames of an earlier size are not related to what follows."""
        ...

    def __call__(self, frame: Frame) -> Tensor:
        """New pixels, uint8 (H, W, 3) on the CPU, of any size; made with `frame.settings`. They are written by another
        thread later: a buffer that the next call fills again must not be given out."""
        ...


@runtime_checkable
class TimesCopies(Protocol):
    """A transform that knows how long its copies took."""

    @property
    def copies_s(self) -> tuple[float, float]:
        """Seconds to the device and back, inside the last call."""
        ...


@runtime_checkable
class Overlapping(Protocol):
    """A transform that can begin a frame before the one before is finished: copies and work then run side by side."""

    @property
    def most_under_way(self) -> int:
        """How many frames may have been begun and not finished."""
        ...

    def begin(self, frame: Frame) -> None: ...

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        ...

    def finish(self) -> Tensor:
        """New pixels of the oldest frame that was begun, as a call would give them."""
        ...


class Identity:
    """Gives back what it is given: the pipeline's own share of the latency."""

    def prepare(self, height: int, width: int) -> None:
        pass

    def __call__(self, frame: Frame) -> Tensor:
        return frame.pixels
