"""Converts between the images of the codec (YUV, even sides) and those of the stream (RGB, any size)."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from av import VideoFrame
from av.video.reformatter import Interpolation
from torch import Tensor

from redline.stream.frames import square_size

# The largest accepted camera image, and the largest image that is shown on the page without downscaling.
MAX_CAMERA_PIXELS = 4096 * 2304
MAX_SHOWN_PIXELS = 1920 * 1080
# Averages when downscaling and interpolates when upscaling; by default swscale would repeat chroma samples.
_SMOOTH = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP | Interpolation.ACCURATE_RND


def crop_and_scale(image: VideoFrame, height: int, width: int) -> Tensor:
    """Crops the centre of the image to the aspect ratio and scales it to the size.

    A browser on a slow connection sends smaller images, while the model keeps its size.
    """
    # Crops first, because scaling an image of one row until it covers the size would need too much memory.
    crop_height = min(image.height, max(1, round(image.width * height / width)))
    crop_width = min(image.width, max(1, round(image.height * width / height)))
    top, left = (image.height - crop_height) // 2, (image.width - crop_width) // 2
    rgb = _rgb(image)[top : top + crop_height, left : left + crop_width]
    if (crop_height, crop_width) != (height, width):
        crop = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
        rgb = _rgb(crop.reformat(width, height, interpolation=_SMOOTH))
    return torch.from_numpy(np.ascontiguousarray(rgb))


def shown_size(height: int, width: int, pixel_aspect: Fraction = Fraction(1)) -> tuple[int, int]:
    """Returns (height, width) on the page: in square pixels, even for chroma subsampling, and small enough to encode
    live."""
    height, width = square_size(height, width, pixel_aspect)
    scale = min(1.0, math.sqrt(MAX_SHOWN_PIXELS / (height * width)))
    if scale == 1.0:
        return height + height % 2, width + width % 2
    return max(2, math.floor(height * scale / 2) * 2), max(2, math.floor(width * scale / 2) * 2)


def to_codec_frame(pixels: Tensor, pixel_aspect: Fraction = Fraction(1)) -> VideoFrame:
    """Returns an image for the codec. An odd side is padded by repeating its last row or column."""
    height, width = pixels.shape[:2]
    shown_height, shown_width = shown_size(height, width, pixel_aspect)
    rgb = pixels.numpy()
    if 0 <= shown_height - height <= 1 and 0 <= shown_width - width <= 1:
        rgb = np.pad(rgb, ((0, shown_height - height), (0, shown_width - width), (0, 0)), mode="edge")
    image = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
    return image.reformat(shown_width, shown_height, "yuv420p", interpolation=_SMOOTH)


def _rgb(image: VideoFrame) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return image.reformat(format="rgb24", interpolation=_SMOOTH).to_ndarray().astype(np.uint8, copy=False)
