"""Where frames come from. A source is opened when it is made, so that what is wrong is said before anything starts.

`frames()` runs in one thread and lets go of what it holds there; `close()` may come from any thread, and only asks:
the frames end soon after. A live source that loses its connection raises `SourceFault`, and connects anew when its
frames are asked for again; whatever cannot be mended by waiting is another `RedlineError`.
"""

from collections.abc import Generator
from fractions import Fraction
from typing import Protocol

from redline.errors import RedlineError
from redline.stream.frames import Frame

# A side of a picture at the most, where we make it: whatever is larger is a slip of the pen.
LARGEST_PX = 16_384


class SourceFault(RedlineError):
    """The source gives no frames at present, and may give some later."""


class Source(Protocol):
    """`is_live`: frames come when they come, and those that nobody takes in time are lost."""

    @property
    def name(self) -> str: ...

    @property
    def is_live(self) -> bool: ...

    @property
    def rate(self) -> Fraction:
        """Frames a second, on average."""
        ...

    @property
    def height(self) -> int:
        """Of the first frame, as `width` is: a later one may have another size."""
        ...

    @property
    def width(self) -> int: ...

    def frames(self) -> Generator[Frame, None, None]: ...

    def close(self) -> None: ...


__all__ = ["LARGEST_PX", "Source", "SourceFault"]
