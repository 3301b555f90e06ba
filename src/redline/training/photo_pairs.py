"""Photos to train on: each decoded once, shrunk if asked for, and with the small picture that the bicubic makes of it.

A photo that cannot be read or is too small is skipped and said; a folder with no other ones is an error.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from redline.cores import cores
from redline.errors import RedlineError
from redline.super_resolution.bicubic import resize
from redline.super_resolution.photos import find_photos, read_photo


@dataclass(frozen=True)
class PhotoSettings:
    """Which photos, and how crops of them are drawn.

    `crop_px` is a side of the small picture. `shrink` reduces photos first, which takes the traces of JPEG out of them
    and puts more detail into a crop; with several factors, crops come from each of them equally often. `flat` is the
    share of crops that are of one colour, and `recolour` of those whose channels are exchanged, weakened and inverted.
    """

    photos: str = ""
    validation: tuple[str, ...] = ()
    shrink: tuple[float, ...] = (1,)
    crop_px: int = 64
    batch: int = 32
    focus: float = 0.5
    flat: float = 0.0
    recolour: float = 0.0

    def __post_init__(self) -> None:
        if not self.photos:
            raise RedlineError("there is nothing to train on: name a folder of photos under [data] or with --photos.")
        if not self.shrink or min(self.shrink) < 1 or len(set(self.shrink)) != len(self.shrink):
            raise RedlineError(f"shrink holds different numbers from 1 up, not {self.shrink}.")
        if self.batch < 1 or self.crop_px < 1 or self.focus < 0:
            raise RedlineError("batch and crop_px must be above zero, and focus must not be negative.")
        if not 0 <= self.flat < 1:
            raise RedlineError(f"flat is a share of the crops, from 0 up to 1, not {self.flat}.")
        if not 0 <= self.recolour <= 1:
            raise RedlineError(f"recolour is a share of the crops, from 0 to 1, not {self.recolour}.")


@dataclass
class PhotoPairs:
    """Iterate over it once; then it knows what was used and what was not."""

    settings: PhotoSettings
    scale: int
    device: torch.device
    photos: int = 0
    pixels: int = 0
    skipped: list[str] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[tuple[float, Tensor, Tensor]]:
        """How much a photo was shrunk; it, and the small picture of it: bytes of (3, H, W) on the device."""
        for path, photo in self._read():
            used = False
            for shrink, high in self._shrunk(path, photo):
                used = True
                self.pixels += high.shape[1] * high.shape[2]
                yield shrink, high, resize(high, 1 / self.scale)
            if used:
                self.photos += 1
                self.hashes.add(hash_of(path))
        if not self.photos:
            first = f" The first: {self.skipped[0]}" if self.skipped else ""
            raise RedlineError(f"no photo of {self.settings.photos!r} can be trained on.{first}")

    def _read(self) -> Iterator[tuple[Path, Tensor]]:
        paths = find_photos(self.settings.photos)
        # A few at a time: decoded photos are large, and the next ones are wanted while one is reduced.
        threads = min(8, cores())
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(paths), 2 * threads):
                several = paths[first : first + 2 * threads]
                for path, photo in zip(several, pool.map(_try_to_read, several), strict=True):
                    if isinstance(photo, str):
                        self.skipped.append(photo)
                    else:
                        yield path, photo

    def _shrunk(self, path: Path, photo: Tensor) -> Iterator[tuple[float, Tensor]]:
        crop, scale = self.settings.crop_px, self.scale
        for shrink in self.settings.shrink:
            height, width = (int(length / shrink) // scale for length in photo.shape[1:])
            if min(height, width) < crop:
                size, needed = f"{photo.shape[2]} × {photo.shape[1]}", math.ceil(crop * scale * shrink)
                self.skipped.append(f"{path.name!r} is {size}, and shrink {shrink:g} needs {needed} pixels a side.")
                continue
            reduced = photo.to(self.device)
            if shrink > 1:
                reduced = resize(reduced, 1 / shrink)
            yield shrink, reduced[:, : height * scale, : width * scale]


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _try_to_read(path: Path) -> Tensor | str:
    try:
        return read_photo(path)
    except RedlineError as error:
        return str(error)
