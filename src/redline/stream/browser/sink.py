"""The pages as a sink: `write` only publishes the frame, so slow, dead or absent viewers cost nothing."""

from redline.stream.browser.broadcast import Broadcast
from redline.stream.frames import Frame


class BrowserSink:
    takes_new_size = True

    def __init__(self, name: str, broadcast: Broadcast) -> None:
        self.name, self._broadcast = name, broadcast

    def write(self, frame: Frame) -> None:
        self._broadcast.publish(frame)

    def close(self, complete: bool = True) -> None:
        self._broadcast.end()

    def abandon(self) -> None:
        self._broadcast.end()
