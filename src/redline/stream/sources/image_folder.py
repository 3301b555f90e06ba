"""The pictures of a folder as a clip, in the order in which a person counts: frame 9 comes before frame 10."""

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
from redline.stream.clock import Clock, SystemClock
from redline.stream.frames import Frame

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


class ImageFolder:
    """Pictures may differ in size: whoever takes the frames sees that."""

    is_live = False

    def __init__(self, folder: Path, rate: Fraction = Fraction(25), clock: Clock | None = None) -> None:
        if not folder.is_dir():
            raise RedlineError(f"{str(folder)!r} is no folder." if folder.exists() else f"no folder {str(folder)!r}.")
        if rate <= 0:
            raise RedlineError(f"a clip needs a rate above 0 frames a second, not {rate}.")
        self._paths = pictures_in(folder)
        if not self._paths:
            raise RedlineError(f"{str(folder)!r} holds no pictures ({', '.join(SUFFIXES)}).")
        self.name, self.rate = folder.name, Fraction(rate)
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        self.height, self.width = read_picture(self._paths[0]).shape[:2]

    def frames(self) -> Generator[Frame, None, None]:
        for index, path in enumerate(self._paths):
            if self._closed.is_set():
                return
            captured_s = self._clock.now_s()
            yield Frame(read_picture(path), index, index, 1 / self.rate, captured_s, duration=1)

    def close(self) -> None:
        self._closed.set()


def pictures_in(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    return sorted(found, key=_counted)


def read_picture(path: Path) -> Tensor:
    """Upright RGB in 8 bits."""
    try:
        with warnings.catch_warnings(), Image.open(path) as picture:
            # Pillow warns of what may be a bomb and of odd metadata; a picture that cannot be read is an error anyway.
            warnings.simplefilter("ignore")
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):
                # Pillow would clip 16 bits to 8 rather than scale them.
                grey = (np.asarray(upright).astype(np.uint32) * 255 + 32767) // 65535
                return torch.from_numpy(grey.astype(np.uint8))[..., None].repeat(1, 1, 3)
            return torch.from_numpy(np.array(upright.convert("RGB")))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RedlineError(f"the picture {path.name!r} cannot be read.") from error


def _counted(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts] + [(0, path.name)]
