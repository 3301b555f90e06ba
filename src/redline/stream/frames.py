"""One frame of a stream, with its capture time and its presentation time, and the clock of the stream."""

import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from PIL import Image
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.settings import Settings

# A more extreme pixel aspect ratio counts as damage and is ignored: scaling to square pixels would fill the memory.
_WIDEST_PIXEL = Fraction(8)


class Clock:
    """The monotonic clock of a stream. Tests replace it to simulate hours."""

    def now_s(self) -> float:
        """Returns seconds since an arbitrary point in time; only differences are meaningful."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits for this time or until `stop` is set. Returns whether `stop` is set."""
        return stop.wait(seconds) if seconds > 0 else stop.is_set()


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame: `pixels` are uint8 RGB (H, W, 3) on the CPU, shown at `pts` · `time_base` seconds of the source's time.

    `index` counts the frames of the source, so that a missing index is a dropped frame. `captured_s` is a time by the
    stream's clock. `duration` is in units of `time_base`; 0 means unknown. `settings` are used to compute the frame.
    `pixel_aspect` is the width of a pixel divided by its height.
    """

    pixels: Tensor
    index: int
    pts: int
    time_base: Fraction
    captured_s: float
    duration: int = 0
    settings: Settings = field(default_factory=Settings)
    pixel_aspect: Fraction = Fraction(1)

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]

    @property
    def time_s(self) -> Fraction:
        return self.pts * self.time_base


def square_size(height: int, width: int, pixel_aspect: Fraction) -> tuple[int, int]:
    """Returns (height, width) in square pixels. Enlarges one side and never shrinks one, so that no detail is lost."""
    if not 1 / _WIDEST_PIXEL <= pixel_aspect <= _WIDEST_PIXEL:
        return height, width
    if pixel_aspect >= 1:
        return height, round(width * pixel_aspect)
    return round(height / pixel_aspect), width


def as_square_pixels(frame: Frame) -> Image.Image:
    """Returns an image with square pixels, for displays that ignore the pixel aspect ratio."""
    image = Image.fromarray(frame.pixels.numpy())
    height, width = square_size(frame.height, frame.width, frame.pixel_aspect)
    if (height, width) == (frame.height, frame.width):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def check_pixels(pixels: Tensor, origin: str) -> Tensor:
    """Returns the pixels. Raises RedlineError if they are not uint8 (H, W, 3) on the CPU."""
    fits = isinstance(pixels, Tensor) and pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    if not fits or pixels.device.type != "cpu" or not pixels.numel():
        shape = f"{pixels.dtype} {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise RedlineError(f"{origin} returned {shape}, not uint8 pixels (H, W, 3) on the CPU.")
    return pixels
