"""Training photos: decoded once, optionally downscaled, each with its low-resolution image from bicubic downscaling.

A photo that is unreadable or too small is skipped and listed in `skipped`. A folder without a usable photo raises an
error.

A long training overfits a few hundred photos. To prevent this, `vary` downscales each photo by new random factors,
different for height and width, every `renew_steps` steps (a round). The factors depend on the seed, the round and the
photo only, so that a resumed training continues with the same images.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from redline.datasets.bicubic import resize, resize_to
from redline.datasets.photos import find_photos, read_photo
from redline.errors import RedlineError
from redline.files.limits import NonNegativeFloat, NonNegativeInt, PositiveInt, Share, ShareBelowOne

# The name of the subfolder of synthetic images.
DRAWN_FOLDER = "drawn"
# With `vary`, photos are stretched: the factors for height and width differ by up to about 15%.
_LARGEST_DISTORTION = 0.15


@dataclass(frozen=True)
class PhotoSettings:
    """The photos, and how crops are sampled from them.

    `crop_px` is the side of a crop of the low-resolution image. Photos are first downscaled by each factor in `shrink`,
    which removes JPEG artifacts and adds detail per crop; all factors supply the same number of crops. `flat` is the
    fraction of crops of one color, `recolour` the fraction with permuted, scaled and inverted channels, and `drawn` the
    fraction from the subfolder named `drawn`. Every `renew_steps` steps, each photo is downscaled again: by each factor
    in `shrink`, multiplied by a random number from 1 to 1 + `vary`.
    """

    photos: str = ""
    validation: tuple[str, ...] = ()
    shrink: tuple[Annotated[float, Meta(ge=1)], ...] = (1,)
    crop_px: PositiveInt = 64
    batch: PositiveInt = 32
    focus: NonNegativeFloat = 0.5
    flat: ShareBelowOne = 0.0
    recolour: Share = 0.0
    drawn: ShareBelowOne = 0.0
    vary: NonNegativeFloat = 0.0
    renew_steps: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not self.photos:
            raise RedlineError("no training data: set photos to a folder under [data], or pass --photos.")
        if not self.shrink or len(set(self.shrink)) != len(self.shrink):
            raise RedlineError(f"shrink must be distinct numbers of at least 1, not {self.shrink}.")
        if (self.vary > 0) != (self.renew_steps > 0):
            raise RedlineError("vary and renew_steps must both be above zero, or both be 0.")


class Variant(NamedTuple):
    """A photo downscaled by one factor, with its low-resolution image; bytes of (3, H, W) on the device."""

    shrink: float
    high: Tensor
    low: Tensor
    drawn: bool


@dataclass
class PhotoPairs:
    """The photos of a folder. Iterating yields the images, counts photos and pixels, and fills `skipped`.

    With `renew_steps`, decoded photos stay on the device, and `variants` downscales them again in each round.
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
        """Yields every photo at every size, and counts the photos that are used."""
        for path, photo in self._read():
            variants = [self._variant(path, high, shrink) for shrink, high in self._shrunk(path, photo)]
            yield from variants
            if variants:
                self.photos += 1
                self.pixels += sum(variant.high[0].numel() for variant in variants)
                self.hashes.add(hash_of(path))
        self._check_any()

    def decode(self) -> None:
        """Decodes all photos to the device, for `variants`, and counts them."""
        settings = self.settings
        largest = (
            1.0 if 1 in settings.shrink else min(settings.shrink) * (1 + settings.vary) * (1 + _LARGEST_DISTORTION)
        )
        needed = math.ceil(settings.crop_px * self.scale * largest)
        for path, photo in self._read():
            if min(photo.shape[1:]) < needed:
                size = f"{photo.shape[2]} × {photo.shape[1]}"
                self.skipped.append(f"{path.name!r} is {size}, but shrink and vary need {needed} pixels per side.")
                continue
            self._decoded.append((path, photo.to(self.device)))
            self.photos += 1
            self.pixels += photo[0].numel()
            self.hashes.add(hash_of(path))
        self._check_any()

    def variants(self, round_: int) -> Iterator[Variant]:
        """Yields every decoded photo at this round's sizes; skips sizes smaller than a crop.

        A shrink factor of 1 leaves the photo unchanged in every round.
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
            first = f" The first skipped photo: {self.skipped[0]}" if self.skipped else ""
            raise RedlineError(f"no photo of {self.settings.photos!r} can be used for training.{first}")

    def _read(self) -> Iterator[tuple[Path, Tensor]]:
        paths = find_photos(self.settings.photos)
        # Decodes a few photos ahead while others are downscaled; decoding all photos first would need too much memory.
        threads = min(8, torch.get_num_threads())
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
                self.skipped.append(f"{path.name!r} is {size}, but shrink {shrink:g} needs {needed} pixels per side.")
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
