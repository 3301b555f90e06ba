"""Where frames go. A sink says what is wrong with its place when it is made, and starts it with the first frame.

All calls come from one thread. `close` finishes what was written; `abandon` leaves no trace of it. One of the two is
called once, whatever happened before.
"""

from typing import Protocol, runtime_checkable

from redline.stream.frames import Frame


class Sink(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def takes_new_size(self) -> bool:
        """Whether a frame may have another size than the one before."""
        ...

    def write(self, frame: Frame) -> None: ...

    def close(self, whole: bool = True) -> None:
        """`whole`: the source came to its end, rather than being stopped."""
        ...

    def abandon(self) -> None: ...


@runtime_checkable
class Idles(Protocol):
    """A sink that has something to do while no frame comes."""

    def idle(self) -> None:
        """Called several times a second then."""
        ...


__all__ = ["Idles", "Sink"]
