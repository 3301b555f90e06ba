"""Makes the timestamps of concatenated recordings continuous.

Broadcast containers can be concatenated (`cat a.ts b.ts`, a camera that restarts), and each recording counts from its
own start. If the timestamps of a stream decrease, the next recording has begun; it is shifted so that it starts where
the previous one ended. All streams of a recording are shifted by the same amount, although each reaches the boundary at
a different packet. Two readers (one for video, one for audio) compute the same shifts if both are given all packets.
"""

from fractions import Fraction

from av.packet import Packet

from redline.video.reading import ARBITRARY_START_FORMATS

# A file may hold several recordings. After one of its streams has entered the next recording, the others follow when
# their timestamps decrease, or jump forward by more than this many seconds.
_LONGEST_PAUSE_S = 1


class ContinuousTimestamps:
    """Shifts the timestamps of packets. `shift` must be called with every packet of all streams, in reading order."""

    def __init__(self, format_name: str) -> None:
        self._may_restart = format_name in ARBITRARY_START_FORMATS
        # The shift of each recording, and for each stream the index of its current recording.
        self._shifts_s = [Fraction(0)]
        self._recordings: dict[int, int] = {}
        self._last_s: dict[int, Fraction] = {}
        self._end_s = Fraction(0)

    def shift(self, packet: Packet) -> None:
        """Adds to the packet's timestamps the shift of the recording that the packet belongs to."""
        dts = packet.dts if packet.dts is not None else packet.pts
        if not self._may_restart or dts is None:
            return
        time_base, index = Fraction(packet.time_base), packet.stream.index
        if packet.is_corrupt:
            # The timestamp of a corrupt packet may be wrong, so it must not start another recording.
            shift_s = self._shifts_s[self._recordings.get(index, -1)]
        else:
            shift_s = self._shifts_s[self._recording(index, dts * time_base)]
            self._last_s[index] = dts * time_base
            self._end_s = max(self._end_s, (dts + (packet.duration or 0)) * time_base + shift_s)
        ticks = round(shift_s / time_base)
        packet.pts = None if packet.pts is None else packet.pts + ticks
        packet.dts = None if packet.dts is None else packet.dts + ticks

    def _recording(self, index: int, time_s: Fraction) -> int:
        newest, last_s = len(self._shifts_s) - 1, self._last_s.get(index)
        current = newest if last_s is None else self._recordings[index]
        if last_s is not None and (time_s < last_s or (current < newest and time_s - last_s > _LONGEST_PAUSE_S)):
            current += 1
            if current > newest:
                self._shifts_s.append(self._end_s - time_s)
        self._recordings[index] = current
        return current
