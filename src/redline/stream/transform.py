"""The interface between the pipeline and whatever computes a new image from each frame."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from redline.stream.frames import Frame


class Transform(Protocol):
    """Called only by the thread that runs the pipeline."""

    def prepare(self, height: int, width: int) -> None:
        """Called before the first frame of a size: allocates, compiles, warms up.

        Raises RedlineError if the size is not supported. Frames of an earlier size do not affect those that follow.
        """
        ...

    def __call__(self, frame: Frame) -> Tensor:
        """Returns new pixels, uint8 (H, W, 3) on the CPU, of any size, computed with `frame.settings`.

        Another thread writes them later, so the next call must not reuse their buffer.
        """
        ...


@runtime_checkable
class TimesCopies(Protocol):
    """A transform that measures its copies."""

    @property
    def copies_s(self) -> tuple[float, float]:
        """Seconds that the last call spent copying to the device and back."""
        ...


@runtime_checkable
class Overlapping(Protocol):
    """A transform that can begin a frame before the previous one is finished, so that copies and compute overlap."""

    @property
    def max_in_flight(self) -> int:
        """How many frames may have begun and not finished."""
        ...

    def begin(self, frame: Frame) -> None: ...

    def is_done(self) -> bool:
        """Returns whether `finish` would return without waiting."""
        ...

    def finish(self) -> Tensor:
        """Returns the pixels of the oldest frame that has begun, as a call would."""
        ...
