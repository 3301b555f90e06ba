"""Detects missing frames inside videos that FFmpeg reads to the end without an error.

When a demuxer loses synchronization in a damaged file, it continues at the next valid position, or ends. How this
shows depends on the format:

- Matroska has timestamps: a gap is reported if bytes were skipped and the timestamps jump at the same position. One of
  the two is not enough, because a frame may have a long duration, and other data may lie between two frames.
- MPEG-TS numbers its packets: a gap is reported if a packet is marked as corrupt and the timestamps jump at about the
  same position. The mark alone is not enough, because packets are also marked as corrupt where recordings were
  concatenated.
- AVI has an index of its frames and no timestamps, so that all frames after a gap come too early. A gap is reported if
  an entry of the index is never read.
- Fragmented MP4 and FLV may declare their duration at the start. A gap is reported if the file ends before that time.
- IVF declares its number of frames at the start. A gap is reported if the file has fewer frames.

The number of frames missing after a truncation is computed from the declared duration.
"""

from fractions import Fraction
from typing import NamedTuple

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

_MATROSKA, _MPEGTS, _AVI, _MP4 = "matroska,webm", "mpegts", "avi", "mov,mp4,m4a,3gp,3g2,mj2"
_FLV, _IVF = "flv", "ivf"
# More bytes than this between two packets count as skipped, because an intact file has at most a few dozen there.
_SKIPPED_BYTES = 512
_FRAMES_MISSING = {_MATROSKA: Fraction(5, 2), _MPEGTS: Fraction(3, 2)}
# Packets come in decoding order, so a corrupt packet may damage a frame that is shown up to this much earlier or later.
_REORDERED_S = Fraction(1, 2)
# Tolerances at the end: a file may end in an index and attachments, and the declared duration is rounded.
_UNREAD_SHARE, _END_MISSING_S = 0.05, 0.25
# An index entry points to a frame, or to the header before it.
_AVI_HEADER_BYTES = 8


class Gap(NamedTuple):
    """The estimated number of missing frames, and the time of the gap."""

    frames: int
    at_s: Fraction


class GapDetector:
    """Finds gaps. `read` must get every packet; the methods that return gaps get the times of decoded frames."""

    def __init__(self, container: InputContainer, stream: VideoStream, rate: Fraction) -> None:
        self._container, self._stream, self._rate = container, stream, rate
        self._kind = container.format.name
        self._end_bytes = 0
        self._last_s: Fraction | None = None
        self._end_s = Fraction(0)
        # FLV does not store how long a frame lasts, so the average is used.
        self._usual_s = 1 / rate if self._kind == _FLV else Fraction(0)
        # For each possible gap, the last timestamp before it.
        self._gaps_s: list[Fraction] = []
        entries = stream.index_entries if self._kind == _AVI else ()
        self._listed = {entry.pos: entry.timestamp for entry in entries if entry.size}
        self._unread = stream.frames if self._kind == _IVF else len(self._listed)
        self._in_order = iter(sorted(self._listed))
        self._is_next = True

    def read(self, packet: Packet) -> None:
        is_video = packet.stream.index == self._stream.index
        if self._last_s is not None and self._is_after_gap(packet, is_video):
            self._gaps_s.append(self._last_s)
        if packet.pos is not None and packet.size:
            self._end_bytes = max(self._end_bytes, packet.pos + packet.size)
            if is_video:
                for pos in (packet.pos, packet.pos - _AVI_HEADER_BYTES):
                    self._listed.pop(pos, None)
                self._unread -= 1
                self._is_next &= packet.pos - next(self._in_order, packet.pos) in (0, _AVI_HEADER_BYTES)
        if is_video and packet.pts is not None:
            time_s = packet.pts * Fraction(packet.time_base)
            self._last_s = time_s if self._last_s is None else max(self._last_s, time_s)
        if (is_video or self._kind == _FLV) and packet.pts is not None:
            # FLV declares the duration of its longest stream: audio counts too, and may continue after the last frame.
            lasts_s = (packet.duration or 0) * Fraction(packet.time_base) or self._usual_s
            self._end_s = max(self._end_s, packet.pts * Fraction(packet.time_base) + lasts_s)

    @property
    def is_gap_possible(self) -> bool:
        """Whether the packets so far may have a gap; how the gap affects the frames is known only after decoding."""
        return bool(self._gaps_s) or not self._is_next

    def between(self, last_s: Fraction, next_s: Fraction) -> Gap | None:
        """Returns the gap between the times of two successive frames, if there is one."""
        least_s = _FRAMES_MISSING.get(self._kind, Fraction(0)) / self._rate
        if not least_s or next_s - last_s < least_s:
            return None
        before_s, after_s = (least_s, Fraction(0)) if self._kind == _MATROSKA else (_REORDERED_S, _REORDERED_S)
        if not any(last_s - before_s <= gap_s <= next_s + after_s for gap_s in self._gaps_s):
            return None
        return Gap(self._missing_frames(last_s, next_s), last_s)

    def at_end(self, last_s: Fraction) -> Gap | None:
        """Returns the gap after the last frame (for AVI, anywhere in the video), if there is one."""
        if self._kind == _AVI:
            # If the positions in the index count from another origin, no packet matches an entry; then the time of the
            # first entry is reported.
            first = min(self._listed.values(), default=0) * Fraction(self._stream.time_base or 0)
            return Gap(self._unread, first) if self._unread > 0 else None
        end_s = self._declared_end_s()
        if end_s is None:
            return None
        if self._kind == _MATROSKA:
            size = self._container.size
            # The declared duration alone proves nothing, because audio may continue after the last frame.
            is_short = size - self._end_bytes > _UNREAD_SHARE * size and end_s - last_s > _END_MISSING_S
        elif self._kind == _IVF:
            # The header holds the number of frames or, from older writers, the duration in ticks.
            is_short = self._unread > 0 and abs(end_s - self._end_s) > _END_MISSING_S
            end_s = end_s if end_s > self._end_s else self._stream.frames / self._rate
        elif self._kind == _FLV:
            is_short = end_s - self._end_s > _END_MISSING_S
        else:
            # An MP4 with a complete index is not checked here: it is checked for truncation before it is read.
            is_fragmented = self._kind == _MP4 and not self._stream.frames
            is_short = is_fragmented and end_s - self._end_s > _END_MISSING_S
        return Gap(self._missing_frames(last_s, end_s), last_s) if is_short else None

    def after_truncation(self, last_s: Fraction) -> Gap:
        """Returns the gap after the last frame of a file that is known to be truncated: at least one frame."""
        end_s = self._declared_end_s()
        return Gap(1 if end_s is None else self._missing_frames(last_s, end_s), last_s)

    def _declared_end_s(self) -> Fraction | None:
        stream, container = self._stream, self._container
        if stream.duration and stream.time_base:
            return (stream.duration + (stream.start_time or 0)) * Fraction(stream.time_base)
        if container.duration and self._kind == _FLV:
            # FLV declares the end time as its duration, whatever the start time is.
            return Fraction(container.duration, av.time_base)
        if container.duration:
            return Fraction(container.duration + (container.start_time or 0), av.time_base)
        return None

    def _is_after_gap(self, packet: Packet, is_video: bool) -> bool:
        if self._kind == _MPEGTS:
            return is_video and packet.is_corrupt
        if self._kind != _MATROSKA or packet.pos is None or not packet.size:
            return False
        return packet.pos - self._end_bytes > _SKIPPED_BYTES

    def _missing_frames(self, last_s: Fraction, next_s: Fraction) -> int:
        return max(1, round((next_s - last_s) * self._rate) - 1)
