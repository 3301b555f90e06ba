"""Discards all frames, for measurements and tests."""

from redline.stream.frames import Frame


class NullSink:
    name = "null"
    takes_new_size = True

    def __init__(self) -> None:
        self.frames = 0

    def write(self, frame: Frame) -> None:
        self.frames += 1

    def close(self, complete: bool = True) -> None:
        pass

    def abandon(self) -> None:
        pass
