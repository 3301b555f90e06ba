"""The images of a folder as a clip, in natural order: frame 9 comes before frame 10."""

import re
import threading
import warnings
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from redline.errors import RedlineError
from redline.stream.frames import Clock, Frame

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


class ImageFolder:
    """The images of a folder as frames; images may differ in size."""

    is_live = False

    def __init__(self, folder: Path, rate: Fraction = Fraction(25), clock: Clock | None = None) -> None:
        if not folder.is_dir():
            raise RedlineError(f"{str(folder)!r} {'is not a folder' if folder.exists() else 'does not exist'}.")
        if rate <= 0:
            raise RedlineError(f"the frame rate must be above 0, not {rate}.")
        self._paths = images_in(folder)
        if not self._paths:
            raise RedlineError(f"{str(folder)!r} has no images ({', '.join(SUFFIXES)}).")
        self.name, self.rate = folder.name, Fraction(rate)
        self._clock = clock or Clock()
        self._closed = threading.Event()
        self.height, self.width = read_image(self._paths[0]).shape[:2]

    def frames(self) -> Generator[Frame, None, None]:
        for index, path in enumerate(self._paths):
            if self._closed.is_set():
                return
            captured_s = self._clock.now_s()
            yield Frame(read_image(path), index, index, 1 / self.rate, captured_s, duration=1)

    def close(self) -> None:
        self._closed.set()


def images_in(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    return sorted(found, key=_natural_key)


def read_image(path: Path) -> Tensor:
    """Returns upright 8-bit RGB pixels."""
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            # Pillow warns about large images and odd metadata; an image that cannot be read raises anyway.
            warnings.simplefilter("ignore")
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):
                # Pillow would clip 16 bits to 8 rather than scale them.
                grey = (np.asarray(upright).astype(np.uint32) * 255 + 32767) // 65535
                return torch.from_numpy(grey.astype(np.uint8))[..., None].repeat(1, 1, 3)
            return torch.from_numpy(np.array(upright.convert("RGB")))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RedlineError(f"cannot read the image {path.name!r}.") from error


def _natural_key(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts] + [(0, path.name)]
