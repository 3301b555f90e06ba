"""Finds the middle frame of a video and the same frame of the upscaled video.

Both are found by seeking, so a long video takes no longer than a short one. If key frames are so rare that too many
frames would have to be decoded, an earlier frame is used.
"""

import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from redline.errors import RedlineError
from redline.upscale.video.pixels import to_rgb
from redline.upscale.video.probe import VideoInfo, probe
from redline.video.reading import main_stream, opened

_MOST_DECODED = 600
# How far before the frame to seek: in some containers, a seek ends after the last key frame or after the frame.
_SEEK_BACK_S = (0.0, 2.0, 20.0, math.inf)


@dataclass(frozen=True)
class Moment:
    """A frame (H, W, 3) of uint8, its time since the first frame, and its rotation in quarter turns to the left.

    Broadcast videos start at an arbitrary time, and their upscaled versions at zero.
    """

    pixels: np.ndarray
    seconds: float
    quarter_turns: int


def middle_of(source: Path, target: Path) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the middle frame before and after, upright, as (H, W, 3) of uint8, and its time in seconds."""
    video, enlarged = probe(source), probe(target)
    half_frame_s = float(0.5 / video.rate)
    before = _frame_at(video, float((video.frames or 0) / video.rate / 2), half_frame_s)
    after = _frame_at(enlarged, before.seconds, half_frame_s)
    if abs(after.seconds - before.seconds) > half_frame_s:
        raise RedlineError(f"cannot find the frame at {before.seconds:.2f} s of {source.name!r} in {target.name!r}.")
    # The encoder may have added a column or row for subsampled chroma.
    scale = round(enlarged.width / video.width)
    pixels = after.pixels[: scale * video.height, : scale * video.width]
    return np.rot90(before.pixels, before.quarter_turns), np.rot90(pixels, before.quarter_turns), before.seconds


def _frame_at(video: VideoInfo, seconds: float, half_frame_s: float) -> Moment:
    """Returns the frame at that time, or the nearest one that can be decoded."""
    nearest: Moment | None = None
    for back_s in _SEEK_BACK_S:
        found = _sought(video, max(0.0, seconds - back_s), seconds - half_frame_s)
        if found is not None and (nearest is None or abs(found.seconds - seconds) < abs(nearest.seconds - seconds)):
            nearest = found
        if nearest is not None and abs(nearest.seconds - seconds) <= half_frame_s:
            break
    if nearest is None:
        raise RedlineError(f"cannot read a frame near {seconds:.2f} s of {video.path.name!r}.")
    return nearest


def _sought(video: VideoInfo, place_s: float, seconds: float) -> Moment | None:
    """Seeks to `place_s` and returns the first frame at or after `seconds`, or the last one before."""
    found: tuple[VideoFrame, int] | None = None
    with opened(video.path) as container:
        stream = main_stream(container, video.path)
        start = stream.start_time or 0
        try:
            if place_s > 0:
                container.seek(start + round(place_s / video.time_base), stream=stream)
            with closing(_decoded(container, stream)) as frames:
                for found in frames:
                    if (found[1] - start) * video.time_base >= seconds:
                        break
        except (av.FFmpegError, OSError):
            return None
    if found is None:
        return None
    frame, pts = found
    pixels = to_rgb(frame, video.colour).mul(255).round().byte().permute(1, 2, 0).numpy()
    return Moment(pixels, float((pts - start) * video.time_base), round((frame.rotation or 0) / 90))


def _decoded(container: InputContainer, stream: VideoStream) -> Generator[tuple[VideoFrame, int], None, None]:
    """Yields each complete frame that has a time stamp, together with its time stamp."""
    for number, frame in enumerate(container.decode(stream)):
        if number >= _MOST_DECODED:
            return
        if isinstance(frame, VideoFrame) and frame.pts is not None and not frame.is_corrupt:
            yield frame, frame.pts
