"""The interface between the pipeline and whatever computes a new image from each frame."""

from typing import Protocol

from torch import Tensor

from redline.stream.frames import Frame


class Transform(Protocol):
    """Called only by the thread that runs the pipeline.

    A frame may begin before the previous one is finished, so that copies and computation overlap. `max_in_flight`
    limits how many frames have begun and are not finished.
    """

    @property
    def max_in_flight(self) -> int: ...

    @property
    def copies_s(self) -> tuple[float, float]:
        """Seconds that the last finished frame spent in copies to the device and back."""
        ...

    def prepare(self, height: int, width: int) -> None:
        """Called before the first frame of a size: allocates, compiles, warms up.

        Raises RedlineError if the size is not supported. Frames of an earlier size do not affect those that follow.
        """
        ...

    def begin(self, frame: Frame) -> None: ...

    def is_done(self) -> bool:
        """Returns whether `finish` would return without waiting."""
        ...

    def finish(self) -> Tensor:
        """Returns new pixels of the oldest frame in flight, uint8 (H, W, 3) on the CPU, of any size.

        Another thread writes them to the sink later, so the next frame must not reuse their buffer.
        """
        ...
