"""Outputs of frames. The constructor of a sink checks its target; the output starts with the first frame.

All calls come from one thread. Either `close`, which finishes the output, or `abandon`, which discards it, is called
once at the end.
"""

from typing import Protocol, runtime_checkable

from redline.stream.frames import Frame


class Sink(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def takes_new_size(self) -> bool:
        """Whether a frame may differ in size from the previous one."""
        ...

    def write(self, frame: Frame) -> None: ...

    def close(self, complete: bool = True) -> None:
        """Finishes the output. `complete` is True if the source ended by itself and was not stopped."""
        ...

    def abandon(self) -> None: ...


@runtime_checkable
class Idles(Protocol):
    """A sink with work to do while no frame comes."""

    def idle(self) -> None:
        """Called several times per second while no frame comes."""
        ...


__all__ = ["Idles", "Sink"]
