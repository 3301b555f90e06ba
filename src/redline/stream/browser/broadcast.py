"""Distributes frames to any number of viewers. Each viewer gets the newest frame whenever it is ready for another one;
publishing never waits for a viewer.

Also converts between the images of the codec (YUV, even sides) and the frames of the stream (RGB, any size).
"""

import asyncio
import math
import threading
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from av import VideoFrame
from av.video.reformatter import Interpolation
from torch import Tensor

from redline.stream.frames import Clock, Frame, square_size
from redline.stream.latency import PERCENTILES
from redline.stream.sinks import Sink

_WINDOW = 256
# The largest camera image that is accepted, and the largest image that the page shows without downscaling, in pixels.
MAX_CAMERA_PIXELS = 4096 * 2304
MAX_SHOWN_PIXELS = 1920 * 1080
# Flags of swscale. AREA averages when downscaling and interpolates when upscaling; with FULL_CHR_H, chroma samples are
# interpolated instead of repeated.
_SMOOTH = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP | Interpolation.ACCURATE_RND


@dataclass(frozen=True)
class Published:
    """A frame, its number counted from 1, and the time at which it was published."""

    frame: Frame
    count: int
    at_s: float


class Broadcast:
    """The frames for all viewers. `publish` is thread-safe; `wanted` is set when a viewer first asks for a frame."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._lock = threading.Lock()
        self.newest: Published | None = None
        self.ended = False
        self.wanted = threading.Event()
        self._viewers: set[Viewer] = set()

    def publish(self, frame: Frame) -> None:
        with self._lock:
            count = self.newest.count if self.newest is not None else 0
            self.newest = Published(frame, count + 1, self.clock.now_s())
        self._wake_viewers()

    def end(self) -> None:
        """Ends the broadcast. Viewers keep showing the last frame."""
        self.ended = True
        self._wake_viewers()

    def _wake_viewers(self) -> None:
        with self._lock:
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()

    def add_viewer(self) -> "Viewer":
        """Returns a new viewer, which belongs to the running event loop."""
        viewer = Viewer(self)
        with self._lock:
            self._viewers.add(viewer)
        return viewer

    def remove_viewer(self, viewer: "Viewer") -> None:
        with self._lock:
            self._viewers.discard(viewer)


class BrowserSink(Sink):
    """A sink that shows frames on the pages. `write` only publishes a frame and never waits for viewers."""

    name = "browser"

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def write(self, frame: Frame) -> None:
        self._broadcast.publish(frame)

    def close(self, complete: bool = True) -> None:
        self._broadcast.end()


class Viewer:
    """One receiver of a broadcast. `skipped` counts frames that newer ones replaced while the viewer was busy."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast, self._loop = broadcast, asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._seen: int | None = None
        # For frames that were published before this viewer connected, no age is measured, because it would include the
        # wait for the viewer.
        newest = broadcast.newest
        self._count_at_start = 0 if newest is None else newest.count
        self._ages_s: deque[float] = deque(maxlen=_WINDOW)
        self._sendings_s: deque[float] = deque(maxlen=_WINDOW)
        self.taken = self.skipped = 0

    async def next(self, repeat_after_s: float) -> tuple[Published, bool] | None:
        """Returns the newest frame, and whether its age should be measured; None at the end of the broadcast.

        The age is measured for frames published after the viewer connected. If no new frame comes within
        `repeat_after_s`, the last one is returned again, so that packet loss does not corrupt a still image for long.
        """
        self._broadcast.wanted.set()
        while True:
            self._woken.clear()
            newest = self._broadcast.newest
            if self._broadcast.ended:
                return None
            if newest is not None and newest.count != self._seen:
                self.skipped += newest.count - self._seen - 1 if self._seen is not None else 0
                self._seen = newest.count
                self.taken += 1
                return newest, newest.count > self._count_at_start
            try:
                await asyncio.wait_for(self._woken.wait(), repeat_after_s)
            except TimeoutError:
                if newest is not None:
                    return newest, False

    def sent(self, published: Published) -> None:
        """Records the time since the frame was captured, and the time since it was published."""
        now_s = self._broadcast.clock.now_s()
        self._ages_s.append(now_s - published.frame.captured_s)
        self._sendings_s.append(now_s - published.at_s)

    def metrics(self) -> dict[str, Any]:
        """Returns counts, and p50, p95 and p99 of the time from capture to sending (`ages_s`) and from publication to
        sending (`sendings_s`). Both are None before a frame was sent."""
        times = {"ages_s": self._ages_s, "sendings_s": self._sendings_s}
        percentiles = {
            name: np.percentile(list(kept), PERCENTILES).tolist() if kept else None for name, kept in times.items()
        }
        return {"taken": self.taken, "skipped": self.skipped, **percentiles}

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:  # the event loop is closed
            self.leave()

    def leave(self) -> None:
        self._broadcast.remove_viewer(self)


def crop_and_scale(image: VideoFrame, height: int, width: int) -> Tensor:
    """Crops the image around its centre to the aspect ratio of height × width, and scales the crop to that size.

    Scaling is needed because a browser on a slow connection sends smaller images.
    """
    # Crops before scaling, because an extreme image (such as a single row) would need too much memory if scaled first.
    crop_height = min(image.height, max(1, round(image.width * height / width)))
    crop_width = min(image.width, max(1, round(image.height * width / height)))
    top, left = (image.height - crop_height) // 2, (image.width - crop_width) // 2
    rgb = _rgb(image)[top : top + crop_height, left : left + crop_width]
    if (crop_height, crop_width) != (height, width):
        crop = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
        rgb = _rgb(crop.reformat(width, height, interpolation=_SMOOTH))
    return torch.from_numpy(np.ascontiguousarray(rgb))


def shown_size(height: int, width: int, pixel_aspect: Fraction = Fraction(1)) -> tuple[int, int]:
    """Returns the (height, width) shown on the page: in square pixels, even, and small enough to encode live."""
    height, width = square_size(height, width, pixel_aspect)
    scale = min(1.0, math.sqrt(MAX_SHOWN_PIXELS / (height * width)))
    if scale == 1.0:
        return height + height % 2, width + width % 2
    return max(2, math.floor(height * scale / 2) * 2), max(2, math.floor(width * scale / 2) * 2)


def to_codec_frame(pixels: Tensor, pixel_aspect: Fraction = Fraction(1)) -> VideoFrame:
    """Returns an image for the codec. An odd side is padded by repeating the last row or column."""
    height, width = pixels.shape[:2]
    shown_height, shown_width = shown_size(height, width, pixel_aspect)
    rgb = pixels.numpy()
    if 0 <= shown_height - height <= 1 and 0 <= shown_width - width <= 1:
        rgb = np.pad(rgb, ((0, shown_height - height), (0, shown_width - width), (0, 0)), mode="edge")
    image = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
    return image.reformat(shown_width, shown_height, "yuv420p", interpolation=_SMOOTH)


def _rgb(image: VideoFrame) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return image.reformat(format="rgb24", interpolation=_SMOOTH).to_ndarray().astype(np.uint8, copy=False)
