"""What is missing inside a film that can be read to its end without a word of it.

Where the reader of a damaged file loses its way it goes on at the next place that looks right, or ends. How that is
seen depends on the file:

- Matroska has times: bytes are passed over, and time is missing there. Either alone is no damage: a picture may be seen
  for long, and other things lie between two.
- MPEG-TS counts its packets: one is marked as broken, and time is missing there. One alone may be where recordings were
  joined, which count anew.
- AVI has an index of its pictures, and no times, so that all behind a hole come too early: one of the index does not
  come.
- Fragmented MP4 and FLV may declare their duration at the start: the file ends before it.
- IVF declares its number of frames at the start: fewer frames are read.

How many pictures are missing behind a cut is counted by the declared duration.
"""

from fractions import Fraction
from typing import NamedTuple

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

_MATROSKA, _MPEGTS, _AVI, _MP4 = "matroska,webm", "mpegts", "avi", "mov,mp4,m4a,3gp,3g2,mj2"
_FLV, _IVF = "flv", "ivf"
# What a whole file has between two packets are a few dozen bytes.
_PASSED_OVER_BYTES = 512
_FRAMES_MISSING = {_MATROSKA: Fraction(5, 2), _MPEGTS: Fraction(3, 2)}
# Packets come in the order of decoding, and the picture that a broken one spoils may be another.
_REORDERED_S = Fraction(1, 2)
# At the end lie an index and attachments, and its time is rounded.
_UNREAD_SHARE, _END_MISSING_S = 0.05, 0.25
# An index names the place of a picture, or of the header before it.
_AVI_HEADER_BYTES = 8


class Gap(NamedTuple):
    """How many pictures are missing, about, and at which time."""

    pictures: int
    at_s: Fraction


class GapDetector:
    """Is given every packet of a film as it is read, and then the times of its pictures, which come later."""

    def __init__(self, container: InputContainer, stream: VideoStream, rate: Fraction) -> None:
        self._container, self._stream, self._rate = container, stream, rate
        self._kind = container.format.name
        self._end_bytes = 0
        self._last_s: Fraction | None = None
        self._end_s = Fraction(0)
        # FLV does not store how long a frame lasts.
        self._usual_s = 1 / rate if self._kind == _FLV else Fraction(0)
        # The last time before each.
        self._holes_s: list[Fraction] = []
        entries = stream.index_entries if self._kind == _AVI else ()
        self._listed = {entry.pos: entry.timestamp for entry in entries if entry.size}
        self._unread = stream.frames if self._kind == _IVF else len(self._listed)
        self._in_order = iter(sorted(self._listed))
        self._is_next = True

    def read(self, packet: Packet) -> None:
        is_picture = packet.stream.index == self._stream.index
        if self._last_s is not None and self._is_behind_hole(packet, is_picture):
            self._holes_s.append(self._last_s)
        if packet.pos is not None and packet.size:
            self._end_bytes = max(self._end_bytes, packet.pos + packet.size)
            if is_picture:
                for pos in (packet.pos, packet.pos - _AVI_HEADER_BYTES):
                    self._listed.pop(pos, None)
                self._unread -= 1
                self._is_next &= packet.pos - next(self._in_order, packet.pos) in (0, _AVI_HEADER_BYTES)
        if is_picture and packet.pts is not None:
            time_s = packet.pts * Fraction(packet.time_base)
            self._last_s = time_s if self._last_s is None else max(self._last_s, time_s)
        if (is_picture or self._kind == _FLV) and packet.pts is not None:
            # FLV declares the duration of its longest stream: audio may continue after the last frame.
            lasts_s = (packet.duration or 0) * Fraction(packet.time_base) or self._usual_s
            self._end_s = max(self._end_s, packet.pts * Fraction(packet.time_base) + lasts_s)

    @property
    def are_possible(self) -> bool:
        """Whether anything that was read so far may lie behind one: then it is not known how it will be decoded."""
        return bool(self._holes_s) or not self._is_next

    def between(self, last_s: Fraction, next_s: Fraction) -> Gap | None:
        """What is missing between two pictures that follow each other."""
        least_s = _FRAMES_MISSING.get(self._kind, Fraction(0)) / self._rate
        if not least_s or next_s - last_s < least_s:
            return None
        before_s, behind_s = (least_s, Fraction(0)) if self._kind == _MATROSKA else (_REORDERED_S, _REORDERED_S)
        if not any(last_s - before_s <= hole_s <= next_s + behind_s for hole_s in self._holes_s):
            return None
        return Gap(self._pictures(last_s, next_s), last_s)

    def at_end(self, last_s: Fraction) -> Gap | None:
        """What is missing behind the last picture, or anywhere in a film whose times do not tell."""
        if self._kind == _AVI:
            # Where the index counts its places from elsewhere, all of them are unknown.
            first = min(self._listed.values(), default=0) * Fraction(self._stream.time_base or 0)
            return Gap(self._unread, first) if self._unread > 0 else None
        end_s = self._declared_end_s()
        if end_s is None:
            return None
        if self._kind == _MATROSKA:
            size = self._container.size
            # The declared duration is that of the longest stream: sound may go on behind the last picture.
            is_short = size - self._end_bytes > _UNREAD_SHARE * size and end_s - last_s > _END_MISSING_S
        elif self._kind == _IVF:
            # The header holds the number of frames or, from older writers, the duration in ticks.
            is_short = self._unread > 0 and abs(end_s - self._end_s) > _END_MISSING_S
            end_s = end_s if end_s > self._end_s else self._stream.frames / self._rate
        elif self._kind == _FLV:
            is_short = end_s - self._end_s > _END_MISSING_S
        else:
            # With a complete index at its start, a file that is too short for it is known before it is read.
            is_fragmented = self._kind == _MP4 and not self._stream.frames
            is_short = is_fragmented and end_s - self._end_s > _END_MISSING_S
        return Gap(self._pictures(last_s, end_s), last_s) if is_short else None

    def behind_cut(self, last_s: Fraction) -> Gap:
        """Returns what is missing behind the last picture of a file that is known to be cut off: at least one."""
        end_s = self._declared_end_s()
        return Gap(1 if end_s is None else self._pictures(last_s, end_s), last_s)

    def _declared_end_s(self) -> Fraction | None:
        stream, container = self._stream, self._container
        if stream.duration and stream.time_base:
            return (stream.duration + (stream.start_time or 0)) * Fraction(stream.time_base)
        if container.duration and self._kind == _FLV:
            # The declared duration is the time of the end, wherever the video starts.
            return Fraction(container.duration, av.time_base)
        if container.duration:
            return Fraction(container.duration + (container.start_time or 0), av.time_base)
        return None

    def _is_behind_hole(self, packet: Packet, is_picture: bool) -> bool:
        if self._kind == _MPEGTS:
            return is_picture and packet.is_corrupt
        if self._kind != _MATROSKA or packet.pos is None or not packet.size:
            return False
        return packet.pos - self._end_bytes > _PASSED_OVER_BYTES

    def _pictures(self, last_s: Fraction, next_s: Fraction) -> int:
        return max(1, round((next_s - last_s) * self._rate) - 1)
