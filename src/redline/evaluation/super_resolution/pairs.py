"""Test sets: large pictures, each with its small one.

Three layouts are known: `name_HR.png` beside `name_LR.png`; folders `HR` and `LR` with equal names; and large pictures
alone, whose small ones the bicubic makes. Large pictures are cut to a multiple of the scale, as papers cut them.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from redline.datasets.bicubic import resize
from redline.datasets.photos import find_photos, read_photo
from redline.errors import RedlineError


@dataclass(frozen=True)
class Pair:
    """A large picture and its small one, both bytes of (3, H, W); `made` when the small one came with no file."""

    name: str
    high: Tensor
    low: Tensor
    made: bool


@dataclass(frozen=True)
class PairFiles:
    """Where a pair lies; without a small picture it is made."""

    name: str
    high: Path
    low: Path | None = None

    def read(self, scale: int) -> Pair:
        high = read_photo(self.high)
        height, width = (length // scale * scale for length in high.shape[-2:])
        if not height or not width:
            raise RedlineError(f"{str(self.high)!r} is smaller than {scale} pixels.")
        high = high[:, :height, :width]
        low = None if self.low is None else read_photo(self.low)
        # A set stored for ×4 still serves a ×2 model: its small pictures are then made anew.
        if low is None or low.shape[-2:] != (height // scale, width // scale):
            return Pair(self.name, high, resize(high, 1 / scale), made=True)
        return Pair(self.name, high, low, made=False)


def find_pairs(folder: str | Path) -> list[PairFiles]:
    """The pairs of a folder, in whichever of the three layouts it is."""
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
