"""Sources of frames. A source is opened by its constructor, so that errors are raised before the stream starts.

`frames()` runs in one thread and releases its resources there. `close()` may be called from any thread and only
requests the end; the frames end soon after. A live source that loses its connection raises `SourceFault`, and
reconnects when `frames()` is called again. Errors that a retry cannot solve are raised as other `RedlineError`s.
"""

from collections.abc import Generator
from fractions import Fraction
from typing import Protocol

from redline.errors import RedlineError
from redline.stream.frames import Frame

# The largest side of generated or resized frames; larger sizes are rejected as typos.
LARGEST_PX = 16_384


class SourceFault(RedlineError):
    """Raised if the source has no frames now but may have some later."""


class Source(Protocol):
    """The base class of sources. `is_live` sources set the pace: frames that are not taken in time are lost.

    `rate` is the average number of frames per second. `height` and `width` are the size of the first frame; later
    frames may have other sizes.
    """

    name: str
    is_live: bool
    rate: Fraction
    height: int
    width: int

    def frames(self) -> Generator[Frame, None, None]: ...

    def close(self) -> None: ...
