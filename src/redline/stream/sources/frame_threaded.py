"""Decodes several pictures of a film at a time, as long as nothing is wrong with it.

Where a picture is one slice, as in most films, only such a decoder has work for several cores. What it makes of damage
hangs on its threads, and near the end it may lose what follows. So at the first sign of any it ends here, before
anything is said or left out, and whoever reads goes over to a decoder that takes one picture after the other.

The signs are an error, a picture or packet that is marked, a hole, and pictures that do not come at the end. What
FFmpeg marks only later, as a picture that leans on a damaged one and is shown before it, or never, as much damage of
HEVC, is given by then: spoiled, as the other decoder gives it, if not with the same pixels.
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
    """The film may be damaged, or cannot be decoded so."""


def decode_frame_threaded(read: Iterator[Packet], stream: VideoStream, holes: GapDetector) -> Iterator[VideoFrame]:
    """The pictures of the packets that are read, or `DamageSuspected`."""
    at_once = enable_frame_threads(stream)
    if at_once < 2:
        raise DamageSuspected
    with_content, shown, are_timed, newest = 0, 0, True, deque[int | None](maxlen=at_once)
    while (packet := _next(read)) is not None:
        if packet.is_corrupt or holes.are_possible:
            raise DamageSuspected
        if packet.size and not packet.is_discard:  # which a film that was trimmed has, and nobody is to see
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
    # At the end an error among the last pictures is not told, and takes those behind it along. Elsewhere a packet may
    # rightly have no picture to show.
    if newest if are_timed else shown < with_content:
        raise DamageSuspected


def _next(read: Iterator[Packet]) -> Packet | None:
    try:
        return next(read, None)
    except RedlineError as error:
        # The careful way tells of it, behind the pictures that are still in the decoder.
        raise DamageSuspected from error
