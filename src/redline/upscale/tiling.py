"""Pads the sides of an image, cuts them into overlapping tiles, and defines how tiles are weighted when they blend.

The network cannot see beyond a tile, so its result for the outermost `margin` positions of a tile is discarded. Over
`ramp` positions in the middle of the overlap, the tiles cross-fade along a Hann window. All tiles start at multiples of
`align`, so that the windows of a windowed model are at the same positions as in the whole image.

Weights are multiples of 1/2048. So the product of a row weight and a column weight is exact in fp32, and the products
at each position sum to exactly 1.

Sizes are (width, height).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.video.padding_index import reflected, wrapped

_STEPS = 2048


@dataclass(frozen=True)
class Cut:
    """How a side is cut: the length of a tile, its margin, the ramp, and the window that tiles are aligned to."""

    tile: int
    margin: int
    ramp: int
    align: int = 1

    def __post_init__(self) -> None:
        if self.tile % self.align:
            raise RedlineError(f"a tile of {self.tile} is not a multiple of the model's window, {self.align}.")
        least = smallest_tile(self.margin, self.ramp, self.align)
        if self.tile < least:
            raise RedlineError(
                f"tiles of {self.tile} are too small for an overlap of {self.overlap}: use {least} or more."
            )

    @property
    def overlap(self) -> int:
        return 2 * self.margin + self.ramp

    @property
    def around(self) -> int:
        """The padding at each end of a side that wraps."""
        return math.ceil(self.overlap / 2 / self.align) * self.align

    @property
    def stride(self) -> int:
        """The largest step from one tile to the next."""
        return (self.tile - self.overlap) // self.align * self.align


@dataclass(frozen=True)
class Side:
    """A side of an image cut into tiles: its length, its length with padding, and where tiles start.

    The padding continues at the opposite end of the image if it `wraps`, and is its reflection otherwise. `before`
    positions of the padding come before the image.
    """

    length: int
    padded: int
    starts: tuple[int, ...]
    cut: Cut
    before: int
    wraps: bool

    def inside(self, scale: int) -> slice:
        """Returns the part of the upscaled side that is the image itself."""
        return slice(self.before * scale, (self.before + self.length) * scale)

    def positions_on(self, device: torch.device | str) -> Tensor:
        """Returns the source position of each padded position."""
        return _positions(self.length, self.before, self.padded, self.wraps, torch.device(device))

    def weights(self, scale: int = 1) -> Tensor:
        """Returns the weight of each position of each tile in the upscaled image, (tiles, scale · tile)."""
        tile, ramp = self.cut.tile * scale, self.cut.ramp * scale
        weights = torch.ones(len(self.starts), tile)
        fading = hann_ramp(ramp)
        for index in range(len(self.starts) - 1):
            first, second = (start * scale for start in self.starts[index : index + 2])
            begin = (second + first + tile - ramp) // 2
            weights[index, begin - first : begin - first + ramp] = 1 - fading
            weights[index, begin - first + ramp :] = 0
            weights[index + 1, begin - second : begin - second + ramp] = fading
            weights[index + 1, : begin - second] = 0
        return weights


def smallest_tile(margin: int, ramp: int, align: int) -> int:
    """Returns the smallest tile that is larger than its overlap and has room for a ramp at each end."""
    return math.ceil(max(2 * margin + ramp + align, 2 * margin + 3 * ramp) / align) * align


def padded_size(size: tuple[int, int], cut: Cut, wrap: bool) -> tuple[int, int]:
    """Returns the size of an image, including its padding if it wraps around."""
    return (size[0] + 2 * cut.around, size[1] + 2 * cut.around) if wrap else size


def count_tiles(length: int, cut: Cut) -> int:
    """Returns the smallest number of tiles that cover a side."""
    spare = max(0, math.ceil(length / cut.align) - cut.tile // cut.align)
    return 1 + math.ceil(spare / (cut.stride // cut.align))


def cut_side(length: int, cut: Cut, wrap: bool = False) -> Side:
    """Cuts a side into the fewest tiles that cover it, spread as evenly as the alignment allows.

    Pads by reflection to the end of the last tile; if the image wraps around, pads both ends with the opposite edge.
    """
    before = cut.around if wrap else 0
    whole = length + 2 * before
    padded = max(cut.tile, math.ceil(whole / cut.align) * cut.align)
    spare, steps = (padded - cut.tile) // cut.align, count_tiles(whole, cut) - 1
    starts = tuple(index * spare // steps * cut.align for index in range(steps + 1)) if steps else (0,)
    return Side(length, padded, starts, cut, before, wrap)


def hann_ramp(length: int) -> Tensor:
    """Returns values from nearly 0 to nearly 1 along half a Hann window, in multiples of 1/2048 for exact sums."""
    position = (torch.arange(length, dtype=torch.float64) + 0.5) / max(length, 1)
    return ((torch.sin(position * math.pi / 2) ** 2 * _STEPS).round() / _STEPS).float()


@lru_cache(maxsize=32)
def _positions(length: int, before: int, padded: int, wraps: bool, device: torch.device) -> Tensor:
    """Caches the source positions on the device, because all frames of a video share them and a copy synchronizes."""
    return (wrapped if wraps else reflected)(-before, padded - before, length).to(device)


@dataclass(frozen=True)
class TileShape:
    """The shape of a tile: how rows and columns are cut."""

    rows: Cut
    columns: Cut

    @property
    def size(self) -> tuple[int, int]:
        return self.columns.tile, self.rows.tile

    @property
    def pixels(self) -> int:
        return self.columns.tile * self.rows.tile

    def computed_pixels(self, size: tuple[int, int], batch: int = 1) -> int:
        """Returns how many pixels the network computes for an image of this size; batches hold tiles of one row."""
        columns, rows = count_tiles(size[0], self.columns), count_tiles(size[1], self.rows)
        return rows * math.ceil(columns / batch) * batch * self.pixels

    def __str__(self) -> str:
        return f"{self.columns.tile} × {self.rows.tile}"


@dataclass(frozen=True)
class Tiling:
    """The tile shapes of a run, and the batch size that incomplete batches are filled up to.

    There are few shapes, because each one is captured or compiled separately. An image uses the shape with the fewest
    computed pixels, so the choice depends only on the size of the image.
    """

    shapes: tuple[TileShape, ...]
    filled_to: int = 1

    @classmethod
    def square(cls, cut: Cut) -> "Tiling":
        return cls((TileShape(cut, cut),))

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple(shape.size for shape in self.shapes)

    @property
    def largest(self) -> TileShape:
        return max(self.shapes, key=lambda shape: shape.pixels)

    def shape_for(self, size: tuple[int, int], wrap: bool = False) -> TileShape:
        size = padded_size(size, self.shapes[0].rows, wrap)
        return min(self.shapes, key=lambda shape: shape.computed_pixels(size, self.filled_to))

    def computed_pixels(self, sizes: Sequence[tuple[int, int]]) -> int:
        return sum(self.shape_for(size).computed_pixels(size, self.filled_to) for size in sizes)

    def __str__(self) -> str:
        return " or ".join(map(str, self.shapes))
