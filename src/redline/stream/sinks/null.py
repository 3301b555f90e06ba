"""Discards all frames, for measurements and tests."""

from redline.stream.frames import Frame
from redline.stream.sinks import Sink


class NullSink(Sink):
    name = "null"

    def __init__(self) -> None:
        self.frames = 0

    def write(self, frame: Frame) -> None:
        self.frames += 1
