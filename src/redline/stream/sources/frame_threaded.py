"""Decodes several frames of a video at a time, as long as no damage is found.

In most videos a frame is one slice, so only frame threads use several cores. Their handling of damage depends on the
timing of the threads, and near the end they may lose frames. Therefore this decoder raises `DamageSuspected` at the
first sign of damage, before anything is reported or skipped, and the caller continues with a sequential decoder.

The signs are a decoding error, a frame or packet marked as corrupt, a gap, and frames that are missing at the end.
FFmpeg marks some damage only later, or never (much damage of HEVC): such frames are returned spoiled, as by the
sequential decoder, but their pixels may differ from its pixels.
"""

from collections import deque
from collections.abc import Iterator

import av
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.stream.sources.gaps import GapDetector
from redline.video.reading import enable_frame_threads


class DamageSuspected(Exception):
    """The video may be damaged, or does not support frame threads."""


def decode_frame_threaded(packets: Iterator[Packet], stream: VideoStream, gaps: GapDetector) -> Iterator[VideoFrame]:
    """Yields the frames of the packets. Raises DamageSuspected."""
    threads = enable_frame_threads(stream)
    if threads < 2:
        raise DamageSuspected
    with_content, shown, are_timed, newest = 0, 0, True, deque[int | None](maxlen=threads)
    while (packet := _next(packets)) is not None:
        if packet.is_corrupt or gaps.is_gap_possible:
            raise DamageSuspected
        if packet.size and not packet.is_discard:  # trimmed videos have packets that are not to be shown
            with_content, are_timed = with_content + 1, are_timed and packet.pts is not None
            newest.append(packet.pts)
        try:
            decoded = packet.decode()
        except (av.FFmpegError, OSError) as error:
            raise DamageSuspected from error
        for frame in decoded:
            if not isinstance(frame, VideoFrame):
                continue
            if frame.is_corrupt:
                raise DamageSuspected
            shown += 1
            if frame.pts in newest:
                newest.remove(frame.pts)
            yield frame
    # An error among the last frames is not reported, and loses the frames after it. Earlier in the file a packet may
    # legitimately have no frame to show.
    if newest if are_timed else shown < with_content:
        raise DamageSuspected


def _next(packets: Iterator[Packet]) -> Packet | None:
    try:
        return next(packets, None)
    except RedlineError as error:
        # The sequential decoder reports this error after the frames that are still in the decoder.
        raise DamageSuspected from error
