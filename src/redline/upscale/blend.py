"""Tiles become one picture again, a row of tiles at a time, so that only one row of them is ever held.

B stands for any leading dimensions (frames, planes), C for channels. A tile's outermost positions count nothing, and
neighbours fade into each other (`layout`); what the next row of tiles still adds to is carried over to it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice

import torch
from torch import Tensor

from redline.upscale.layout import Side, TileShape
from redline.upscale.padding import Framed, frame

Enlarge = Callable[[Tensor], Tensor]  # (N, 3, height, width) -> (N, 3, scale · height, scale · width)
EnlargeEach = Callable[[Iterable[Tensor]], Iterable[Tensor]]  # the same for batch after batch, in order


class Blender:
    """Takes the rows of tiles from top to bottom; gives the picture's rows as they are finished."""

    def __init__(self, rows: Side, columns: Side, scale: int, device: torch.device | str = "cpu") -> None:
        self._rows, self._columns, self._scale = rows, columns, scale
        # Both may be set between two rows of tiles: to go on elsewhere, or to do a row again.
        self.device = torch.device(device)
        self.carried: Tensor | None = None

    def blend(self, row: int, tiles: Iterable[Tensor]) -> Tensor:
        """The finished rows above the next row of tiles, (…, rows, scale · padded width); tiles go left to right."""
        scale, starts = self._scale, self._rows.starts
        row_weights, column_weights = (_weights(side, scale, self.device) for side in (self._rows, self._columns))
        band: Tensor | None = None
        for column, tile in enumerate(tiles):
            tile = tile.to(self.device)
            if band is None:
                band = tile.new_zeros((*tile.shape[:-1], self._columns.padded * scale), dtype=torch.float32)
            left = self._columns.starts[column] * scale
            band[..., left : left + tile.shape[-1]] += tile * column_weights[column]
        assert band is not None
        band *= row_weights[row][:, None]
        if self.carried is not None:
            band[..., : self.carried.shape[-2], :] += self.carried.to(self.device)
        last = row == len(starts) - 1
        finished = band.shape[-2] if last else (starts[row + 1] - starts[row]) * scale
        self.carried = None if last else band[..., finished:, :]
        return band[..., :finished, :]


@lru_cache(maxsize=32)
def _weights(side: Side, scale: int, device: torch.device) -> Tensor:
    """Made and sent once: the frames of a film have the same, and sending waits for the device."""
    return side.weights(scale).to(device)


def enlarge_by_tiles(
    picture: Tensor, enlarge: Enlarge, scale: int, shape: TileShape, batch: int, wrap: bool = False
) -> Tensor:
    """A picture, or several of one size, that fit in memory: (B, 3, H, W) -> (B, 3, scale · H, scale · W)."""
    return enlarge_each_by_tiles(picture, partial(map, enlarge), scale, shape, batch, wrap)


def enlarge_each_by_tiles(
    picture: Tensor, enlarge_each: EnlargeEach, scale: int, shape: TileShape, batch: int, wrap: bool = False
) -> Tensor:
    """The same by what may have several batches under way, of different rows of tiles too."""
    rows, columns = frame(picture.shape[-2], shape.rows, wrap), frame(picture.shape[-1], shape.columns, wrap)
    blender = Blender(rows.side, columns.side, scale, picture.device)
    bands = (
        picture[..., rows.positions_on(picture.device)[top : top + shape.rows.tile], :] for top in rows.side.starts
    )
    tiles = iter(enlarged_tiles(bands, columns, enlarge_each, batch))
    across = len(columns.side.starts)
    whole = torch.cat([blender.blend(row, islice(tiles, across)) for row in range(len(rows.side.starts))], dim=-2)
    return whole[..., rows.inside(scale), columns.inside(scale)]


def enlarged_tiles(bands: Iterable[Tensor], columns: Framed, enlarge_each: EnlargeEach, batch: int) -> Iterable[Tensor]:
    """The enlarged tiles of bands (B, 3, tile height, W), each from left to right, computed `batch` at a time."""
    tile, starts, count = columns.side.cut.tile, columns.side.starts, 1

    def batches() -> Iterator[Tensor]:
        nonlocal count
        for band in bands:
            count = band.shape[0]
            padded = band[..., columns.positions_on(band.device)]
            yield from torch.stack([padded[..., left : left + tile] for left in starts]).flatten(0, 1).split(batch)

    waiting: list[Tensor] = []
    for enlarged in enlarge_each(batches()):
        waiting += enlarged.unbind(0)
        while len(waiting) >= count:
            yield torch.stack(waiting[:count])
            del waiting[:count]
