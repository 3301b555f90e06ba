"""Between a codec's pictures (YUV, even sides) and the stream's (RGB, any size)."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from av import VideoFrame
from av.video.reformatter import Interpolation
from torch import Tensor

from redline.stream.frames import square_size

# What a browser's camera may send, and what is shown on the page without being made smaller.
MOST_SENT_PIXELS = 4096 * 2304
MOST_SHOWN_PIXELS = 1920 * 1080
# Averages where it makes smaller and is bilinear where it makes larger; by default colours would be repeated instead.
_SMOOTH = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP | Interpolation.ACCURATE_RND


def crop_and_scale(picture: VideoFrame, height: int, width: int) -> Tensor:
    """The middle of the picture, cut to this shape and scaled to this size. A browser sends smaller pictures when its
    line is slow; the model goes on with its one shape."""
    # Cut first: a picture of one row, scaled until it covers, would not fit in memory.
    cut_height = min(picture.height, max(1, round(picture.width * height / width)))
    cut_width = min(picture.width, max(1, round(picture.height * width / height)))
    top, left = (picture.height - cut_height) // 2, (picture.width - cut_width) // 2
    rgb = _rgb(picture)[top : top + cut_height, left : left + cut_width]
    if (cut_height, cut_width) != (height, width):
        cut = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
        rgb = _rgb(cut.reformat(width, height, interpolation=_SMOOTH))
    return torch.from_numpy(np.ascontiguousarray(rgb))


def shown_size(height: int, width: int, pixel_aspect: Fraction = Fraction(1)) -> tuple[int, int]:
    """The size on the page: in square pixels, even, as the codec halves the colours, and no larger than can be encoded
    live."""
    height, width = square_size(height, width, pixel_aspect)
    scale = min(1.0, math.sqrt(MOST_SHOWN_PIXELS / (height * width)))
    if scale == 1.0:
        return height + height % 2, width + width % 2
    return max(2, math.floor(height * scale / 2) * 2), max(2, math.floor(width * scale / 2) * 2)


def to_codec_frame(pixels: Tensor, pixel_aspect: Fraction = Fraction(1)) -> VideoFrame:
    """An odd side repeats its last row or column, where nothing else changes its size."""
    height, width = pixels.shape[:2]
    shown_height, shown_width = shown_size(height, width, pixel_aspect)
    rgb = pixels.numpy()
    if 0 <= shown_height - height <= 1 and 0 <= shown_width - width <= 1:
        rgb = np.pad(rgb, ((0, shown_height - height), (0, shown_width - width), (0, 0)), mode="edge")
    picture = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
    return picture.reformat(shown_width, shown_height, "yuv420p", interpolation=_SMOOTH)


def _rgb(picture: VideoFrame) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return picture.reformat(format="rgb24", interpolation=_SMOOTH).to_ndarray().astype(np.uint8, copy=False)
