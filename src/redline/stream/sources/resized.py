"""Scales the frames of a source to one size, for a model at a fixed size."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from PIL import Image

from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.sources import LARGEST_PX, Source, SourceWrapper


def check_size(height: int, width: int) -> None:
    if not (1 <= height <= LARGEST_PX and 1 <= width <= LARGEST_PX):
        raise RedlineError(f"invalid size {width}×{height}: each side must have 1 to {LARGEST_PX} pixels.")


class Resized(SourceWrapper):
    """Scales without cropping, so another aspect ratio distorts the image. Pixels become square."""

    def __init__(self, source: Source, height: int, width: int) -> None:
        check_size(height, width)
        super().__init__(source)
        self.height, self.width = height, width

    def frames(self) -> Generator[Frame, None, None]:
        with closing(self.inner.frames()) as frames:
            for frame in frames:
                if (frame.height, frame.width) != (self.height, self.width):
                    image = Image.fromarray(frame.pixels.numpy())
                    scaled = image.resize((self.width, self.height), Image.Resampling.BICUBIC)
                    frame = replace(frame, pixels=torch.from_numpy(np.array(scaled)))
                yield replace(frame, pixel_aspect=Fraction(1))
