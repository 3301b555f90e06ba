"""Photos to train on: each decoded once, shrunk if asked for, and with the small picture that the bicubic makes of it.

A photo that cannot be read or is too small is skipped and said; a folder with no other ones is an error.

A few hundred photos are learnt by heart in a long training. With `vary`, each photo is reduced by other factors, and
its height by another factor than its width, in every round of `renew_steps` steps. The factors depend on the seed, the
round and the photo alone, so that a resumed training continues with the same images.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.datasets.bicubic import resize, resize_to
from redline.datasets.photos import find_photos, read_photo
from redline.errors import RedlineError
from redline.machine.cores import cores

# The folder, within the folder of photos, of images that were drawn by a program.
DRAWN_FOLDER = "drawn"
# Height and width are reduced by factors whose ratio differs from 1 by at most this.
_LARGEST_DISTORTION = 0.15


@dataclass(frozen=True)
class PhotoSettings:
    """Which photos, and how crops of them are drawn.

    `crop_px` is a side of the small picture. `shrink` reduces photos first, which takes the traces of JPEG out of them
    and puts more detail into a crop; with several factors, crops come from each of them equally often. `flat` is the
    share of crops that are of one colour, and `recolour` of those whose channels are exchanged, weakened and inverted.
    `drawn` is the share of crops that come from the folder `drawn` among the photos. Every `renew_steps` steps each
    photo is reduced anew, by `shrink` times a random factor from 1 to 1 + `vary`.
    """

    photos: str = ""
    validation: tuple[str, ...] = ()
    shrink: tuple[float, ...] = (1,)
    crop_px: int = 64
    batch: int = 32
    focus: float = 0.5
    flat: float = 0.0
    recolour: float = 0.0
    drawn: float = 0.0
    vary: float = 0.0
    renew_steps: int = 0

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
        if not 0 <= self.drawn < 1:
            raise RedlineError(f"drawn is a share of the crops, from 0 up to 1, not {self.drawn}.")
        if self.vary < 0 or self.renew_steps < 0 or (self.vary > 0) != (self.renew_steps > 0):
            raise RedlineError("vary and renew_steps go together: set both above zero, or neither.")


class Variant(NamedTuple):
    """One photo reduced by one factor, with its small image: bytes of (3, H, W) on the device."""

    shrink: float
    high: Tensor
    low: Tensor
    drawn: bool


@dataclass
class PhotoPairs:
    """Iterate over it once; then it knows what was used and what was not.

    With `renew_steps`, photos stay on the device once they are decoded, and `variants` reduces them anew each round.
    """

    settings: PhotoSettings
    scale: int
    device: torch.device
    seed: int = 0
    photos: int = 0
    pixels: int = 0
    skipped: list[str] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)
    _decoded: list[tuple[Path, Tensor]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Variant]:
        """Yields every photo in every size, and counts what is used."""
        for path, photo in self._read():
            variants = [self._variant(path, high, shrink) for shrink, high in self._shrunk(path, photo)]
            yield from variants
            if variants:
                self.photos += 1
                self.pixels += sum(variant.high[0].numel() for variant in variants)
                self.hashes.add(hash_of(path))
        self._check_any()

    def decode(self) -> None:
        """Reads all photos into the device's memory, for `variants`, and counts them."""
        settings = self.settings
        largest = (
            1.0 if 1 in settings.shrink else min(settings.shrink) * (1 + settings.vary) * (1 + _LARGEST_DISTORTION)
        )
        needed = math.ceil(settings.crop_px * self.scale * largest)
        for path, photo in self._read():
            if min(photo.shape[1:]) < needed:
                size = f"{photo.shape[2]} × {photo.shape[1]}"
                self.skipped.append(f"{path.name!r} is {size}, and shrink and vary need {needed} pixels a side.")
                continue
            self._decoded.append((path, photo.to(self.device)))
            self.photos += 1
            self.pixels += photo[0].numel()
            self.hashes.add(hash_of(path))
        self._check_any()

    def variants(self, round_: int) -> Iterator[Variant]:
        """Yields every decoded photo in this round's sizes.

        Sizes below a crop are left out. A shrink of 1 is the photo as it is, in every round.
        """
        for index, (path, photo) in enumerate(self._decoded):
            random = torch.Generator().manual_seed((self.seed * 1_000_003 + round_) * 1_000_003 + index)
            for shrink in self.settings.shrink:
                vary, distort = torch.rand(2, generator=random, dtype=torch.float64).tolist()
                factor, ratio = shrink * (1 + self.settings.vary * vary), 1 + _LARGEST_DISTORTION * (distort - 0.5)
                factors = (1.0, 1.0) if shrink == 1 else (max(factor * ratio, 1.0), max(factor / ratio, 1.0))
                sizes = (int(length / one) for length, one in zip(photo.shape[1:], factors, strict=True))
                height, width = (size // self.scale * self.scale for size in sizes)
                if min(height, width) < self.settings.crop_px * self.scale:
                    continue
                reduced = photo[:, :height, :width] if shrink == 1 else resize_to(photo, height, width)
                yield self._variant(path, reduced, shrink)

    def _variant(self, path: Path, high: Tensor, shrink: float) -> Variant:
        drawn = DRAWN_FOLDER in path.relative_to(self.settings.photos).parts[:-1]
        return Variant(shrink, high, resize(high, 1 / self.scale), drawn)

    def _check_any(self) -> None:
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
