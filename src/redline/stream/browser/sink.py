"""Pages as a sink. Writing only leaves the frame where viewers find it: a slow, dead or absent one costs nothing."""

from redline.stream.browser.broadcast import Broadcast
from redline.stream.frames import Frame


class BrowserSink:
    takes_new_size = True

    def __init__(self, name: str, outlet: Broadcast) -> None:
        self.name, self._outlet = name, outlet

    def write(self, frame: Frame) -> None:
        self._outlet.put(frame)

    def close(self, whole: bool = True) -> None:
        self._outlet.end()

    def abandon(self) -> None:
        self._outlet.end()
