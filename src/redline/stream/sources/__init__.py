"""Sources of frames. A source is opened by its constructor, so that errors come before a stream starts.

`frames()` runs in one thread and releases its resources there. `close()` may be called from any thread and only
requests the end; the frames end soon after. A live source that loses its connection raises `SourceFault`, and
reconnects when `frames()` is called again. Errors that a retry cannot solve are raised as other `RedlineError`s.
"""

from collections.abc import Generator
from fractions import Fraction
from typing import Protocol

from redline.errors import RedlineError
from redline.stream.frames import Frame

# The largest side of generated or resized frames; larger sizes are rejected as typing errors.
LARGEST_PX = 16_384


class SourceFault(RedlineError):
    """Raised when the source gives no frames at present but may give some later."""


class Source(Protocol):
    """`is_live` sources set the pace: frames that are not taken in time are lost.

    `rate` is the average number of frames per second. `height` and `width` are those of the first frame; later frames
    may differ.
    """

    name: str
    is_live: bool
    rate: Fraction
    height: int
    width: int

    def frames(self) -> Generator[Frame, None, None]: ...

    def close(self) -> None: ...
