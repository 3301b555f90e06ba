"""What is missing inside a film that can be read to its end without a word of it: a damaged Matroska file.

Where its reader loses its way it goes on at the next place that looks right, or ends. Then bytes are passed over and
time is missing at once; either alone is no damage: a picture may be seen for long, and other things lie between two.
"""

from fractions import Fraction

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

# What a whole file has between two packets are a few dozen bytes.
_PASSED_OVER_BYTES = 512
_FRAMES_MISSING = Fraction(5, 2)
# At the end lie an index and attachments, and its time is rounded.
_UNREAD_SHARE, _END_MISSING_S = 0.05, 0.25


class Holes:
    """Is given every packet of a film as it is read, and then the times of its pictures, which come later."""

    def __init__(self, container: InputContainer, stream: VideoStream, rate: Fraction) -> None:
        self._container, self._stream = container, stream
        self._can_lose_its_way = container.format.name == "matroska,webm"
        self._least_s = _FRAMES_MISSING / rate
        self._end_bytes = 0
        self._last_s: Fraction | None = None
        # The last time before bytes that were passed over.
        self._holes_s: list[Fraction] = []

    def read(self, packet: Packet) -> None:
        if not self._can_lose_its_way or packet.pos is None or not packet.size:
            return
        if packet.pos - self._end_bytes > _PASSED_OVER_BYTES and self._last_s is not None:
            self._holes_s.append(self._last_s)
        self._end_bytes = max(self._end_bytes, packet.pos + packet.size)
        if packet.stream.index == self._stream.index and packet.pts is not None:
            time_s = packet.pts * Fraction(packet.time_base)
            self._last_s = time_s if self._last_s is None else max(self._last_s, time_s)

    def are_between(self, last_s: Fraction, next_s: Fraction) -> bool:
        """Whether pictures are missing between two that follow each other."""
        if next_s - last_s < self._least_s:
            return False
        return any(last_s <= hole_s + self._least_s and hole_s <= next_s for hole_s in self._holes_s)

    def are_behind(self, last_s: Fraction) -> bool:
        """Whether pictures are missing behind the last one."""
        container = self._container
        if not self._can_lose_its_way or not container.duration:
            return False
        end_s = Fraction(container.duration + (container.start_time or 0), av.time_base)
        is_unread = container.size - self._end_bytes > _UNREAD_SHARE * container.size
        return is_unread and end_s - last_s > _END_MISSING_S
