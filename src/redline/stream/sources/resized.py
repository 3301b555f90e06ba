"""A source whose frames are brought to one size: a model at a fixed size, whatever the camera gives."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from PIL import Image

from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.sources import LARGEST_PX, Source


def check_size(height: int, width: int) -> None:
    if not (1 <= height <= LARGEST_PX and 1 <= width <= LARGEST_PX):
        raise RedlineError(f"a picture has 1 to {LARGEST_PX} pixels a side, not {width}×{height}.")


class Resized:
    """Frames are scaled, not cut: whoever asks for another shape gets it, in square pixels."""

    def __init__(self, source: Source, height: int, width: int) -> None:
        check_size(height, width)
        self.inner, self.height, self.width = source, height, width

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def is_live(self) -> bool:
        return self.inner.is_live

    @property
    def rate(self) -> Fraction:
        return self.inner.rate

    def frames(self) -> Generator[Frame, None, None]:
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if (frame.height, frame.width) != (self.height, self.width):
                    picture = Image.fromarray(frame.pixels.numpy())
                    scaled = picture.resize((self.width, self.height), Image.Resampling.BICUBIC)
                    frame = replace(frame, pixels=torch.from_numpy(np.array(scaled)))
                yield replace(frame, pixel_aspect=Fraction(1))

    def close(self) -> None:
        self.inner.close()
