"""One picture on its way through the stream, with its two times: when it was captured and when it is to be shown."""

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.settings import Settings

# Nobody's pixels are longer: a file that says so is wrong, and would fill the memory.
_WIDEST_PIXEL = Fraction(8)


@dataclass(frozen=True, eq=False)
class Frame:
    """`pixels` are uint8 RGB (H, W, 3) on the CPU; shown at `pts` · `time_base` seconds of the source's own time.

    `captured_s` is of the stream's clock; `index` counts what the source gave, so that a gap is a drop; `duration` is
    in ticks of `time_base`, and 0 where it is not known. `settings` are those in force when its computation began.
    `pixel_aspect` is how much wider than high a pixel is to be shown.
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
    """The size in square pixels that looks the same. One side grows and none shrinks, so that nothing is lost."""
    if not 1 / _WIDEST_PIXEL <= pixel_aspect <= _WIDEST_PIXEL:
        return height, width
    if pixel_aspect >= 1:
        return height, round(width * pixel_aspect)
    return round(height / pixel_aspect), width


def check_pixels(pixels: Tensor, made_by: str) -> Tensor:
    """The pixels, where they are what a frame holds."""
    fits = isinstance(pixels, Tensor) and pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    if not fits or pixels.device.type != "cpu" or not pixels.numel():
        shape = f"{pixels.dtype} {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise RedlineError(f"{made_by} gave {shape}, not uint8 pixels (H, W, 3) on the CPU.")
    return pixels
