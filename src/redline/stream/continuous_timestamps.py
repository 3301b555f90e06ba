"""Times that go on rising in a film that was joined of several recordings, each of which counts anew.

Broadcast containers can be put one behind the other (`cat a.ts b.ts`, a camera that starts again). Where the times of
a stream fall, it comes to the next recording, and is moved by as much as lets that begin where the last one ended. The
streams do not get there at the same packet, but are moved by the same. Pictures and sound are read apart: whoever is
given all packets moves them alike.
"""

from fractions import Fraction

from av.packet import Packet

# Containers that count from an arbitrary time: others say themselves when a picture is to be shown.
ARBITRARY_START_FORMATS = ("mpegts", "mpeg", "mpegtsraw")
# A stream that rests for longer than this may have passed the joint meanwhile, without falling.
_LONGEST_REST_S = 1


class ContinuousTimestamps:
    """Is given every packet of a film, of all streams, as they are read; `kind` is the container's format."""

    def __init__(self, kind: str) -> None:
        self._counts_anew = kind in ARBITRARY_START_FORMATS
        # By how much each recording is moved, and which one each stream is in.
        self._moves_s = [Fraction(0)]
        self._recordings: dict[int, int] = {}
        self._last_s: dict[int, Fraction] = {}
        self._end_s = Fraction(0)

    def move(self, packet: Packet) -> None:
        """Puts the packet where it belongs."""
        dts = packet.dts if packet.dts is not None else packet.pts
        if not self._counts_anew or dts is None:
            return
        time_base, index = Fraction(packet.time_base), packet.stream.index
        if packet.is_corrupt:
            # Its time may be as wrong as the rest of it.
            moved_s = self._moves_s[self._recordings.get(index, -1)]
        else:
            moved_s = self._moves_s[self._recording(index, dts * time_base)]
            self._last_s[index] = dts * time_base
            self._end_s = max(self._end_s, (dts + (packet.duration or 0)) * time_base + moved_s)
        ticks = round(moved_s / time_base)
        packet.pts = None if packet.pts is None else packet.pts + ticks
        packet.dts = None if packet.dts is None else packet.dts + ticks

    def _recording(self, index: int, time_s: Fraction) -> int:
        newest, last_s = len(self._moves_s) - 1, self._last_s.get(index)
        now = newest if last_s is None else self._recordings[index]
        if last_s is not None and (time_s < last_s or (now < newest and time_s - last_s > _LONGEST_REST_S)):
            now += 1
            if now > newest:
                self._moves_s.append(self._end_s - time_s)
        self._recordings[index] = now
        return now
