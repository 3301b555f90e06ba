"""Test sets of high-resolution images, each with its low-resolution version.

A folder may have three layouts: `name_HR.png` beside `name_LR.png`; folders `HR` and `LR` with the same names; or
high-resolution images only, which are downscaled by bicubic interpolation. High-resolution images are cropped to a
multiple of the scale, as in papers.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from redline.datasets.bicubic import resize
from redline.datasets.photos import find_photos, read_photo
from redline.errors import RedlineError


@dataclass(frozen=True)
class Pair:
    """A large and a small image, both (3, H, W) of uint8. `made` is True if bicubic downscaling made the small one."""

    name: str
    high: Tensor
    low: Tensor
    made: bool


@dataclass(frozen=True)
class PairFiles:
    """The files of a pair. Without `low`, the small image is made by bicubic downscaling."""

    name: str
    high: Path
    low: Path | None = None

    def read(self, scale: int) -> Pair:
        high = read_photo(self.high)
        height, width = (length // scale * scale for length in high.shape[-2:])
        if not height or not width:
            raise RedlineError(f"{str(self.high)!r} is too small for ×{scale}: use at least {scale} pixels per side.")
        high = high[:, :height, :width]
        low = None if self.low is None else read_photo(self.low)
        # Small images of another size, for example of a ×4 set for a ×2 model, are replaced by bicubic downscaling.
        if low is None or low.shape[-2:] != (height // scale, width // scale):
            return Pair(self.name, high, resize(high, 1 / scale), made=True)
        return Pair(self.name, high, low, made=False)


def find_pairs(folder: str | Path) -> list[PairFiles]:
    """Returns the pairs of a folder in any of the three layouts."""
    folder = Path(folder)
    if (folder / "HR").is_dir():
        large = _named(folder / "HR")
        small = _named(folder / "LR") if (folder / "LR").is_dir() else {}
        return [PairFiles(name, path, small.get(name)) for name, path in large.items()]
    found = _named(folder)
    pairs = [
        PairFiles(name.removesuffix("_HR"), path, found.get(name.removesuffix("_HR") + "_LR"))
        for name, path in found.items()
        if name.endswith("_HR")
    ]
    return pairs or [PairFiles(name, path) for name, path in found.items()]


def _named(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in find_photos(folder)}
