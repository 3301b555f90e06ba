"""When a picture was handed to the decoder, where it may wait for others: a frame is as old as that."""

from av.packet import Packet

from redline.stream.clock import Clock

# More than any decoder holds back: what is still here then was never shown.
_MOST_UNDER_WAY = 64


class Handed:
    """Is told of every packet before it is decoded, and asked for every picture once."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now_s = clock, clock.now_s()
        # In the order in which they were handed over.
        self._under_way: list[tuple[int | None, float]] = []

    def over(self, packet: Packet) -> None:
        self._now_s = self._clock.now_s()
        if packet.size:
            self._under_way = [*self._under_way[1 - _MOST_UNDER_WAY :], (packet.pts, self._now_s)]

    def at_s(self, pts: int | None) -> float:
        """Of a picture whose packet is not known: since when the oldest is under way."""
        entry = next((entry for entry in self._under_way if pts is not None and entry[0] == pts), None)
        if entry is None:
            entry = self._under_way[0] if self._under_way else (pts, self._now_s)
        # Those that would have been shown before will not come any more.
        self._under_way = [
            other
            for other in self._under_way
            if other is not entry and (pts is None or other[0] is None or other[0] > pts)
        ]
        return entry[1]
