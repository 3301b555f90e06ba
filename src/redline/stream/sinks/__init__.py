"""Outputs of frames. The constructor of a sink checks its target; the output starts with the first frame.

All calls come from one thread. Either `close`, which finishes the output, or `abandon`, which discards it, is called
once at the end.
"""

from typing import Protocol

from redline.stream.frames import Frame


class Sink(Protocol):
    """The interface and the base class of sinks. If a sink also has a method `idle`, it is called several times per
    second while no frame comes. `takes_new_size`: whether a frame may differ in size from the previous one."""

    name: str
    takes_new_size: bool = True

    def write(self, frame: Frame) -> None: ...

    def close(self, complete: bool = True) -> None:
        """Finishes the output. `complete` is True if the source ended by itself and was not stopped."""

    def abandon(self) -> None:
        """Discards the output, or closes it if there is nothing to discard."""
        self.close(complete=False)


class NullSink(Sink):
    """Discards all frames, for measurements and tests."""

    name = "null"

    def __init__(self) -> None:
        self.frames = 0

    def write(self, frame: Frame) -> None:
        self.frames += 1

    def close(self, complete: bool = True) -> None:
        pass
