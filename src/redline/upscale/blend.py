"""Blends overlapping tiles into one image, strip by strip, so that only unfinished pixels stay in memory.

B stands for any leading dimensions (frames, planes), C for channels. The margin of a tile has weight 0, and the weights
of neighbouring tiles cross-fade (see `tiling`). The part of a tile that overlaps the next tile of its row is kept until
that tile is added, and the part that overlaps the next row of tiles is carried over to that row.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from redline.upscale.tiling import Side, TileShape, cut_side

Enlarge = Callable[[Tensor], Tensor]  # (N, 3, height, width) -> (N, 3, scale · height, scale · width)
EnlargeEach = Callable[[Iterable[Tensor]], Iterable[Tensor]]  # applies `Enlarge` to each of several batches


class Blender:
    """Takes rows of tiles from top to bottom, and yields rows of the image as soon as they are finished."""

    def __init__(self, rows: Side, columns: Side, scale: int, device: torch.device | str = "cpu") -> None:
        self._rows, self._columns, self._scale = rows, columns, scale
        # Callers may set `device` and `carried` between two rows of tiles, to change the device or to repeat a row.
        self.device = torch.device(device)
        self.carried: Tensor | None = None

    def finished_rows(self, row: int) -> int:
        """Returns how many image rows this row of tiles finishes: the rows above the next row of tiles."""
        starts, tile = self._rows.starts, self._rows.cut.tile
        return (tile if row == len(starts) - 1 else starts[row + 1] - starts[row]) * self._scale

    def blend(self, row: int, tiles: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yields the finished rows in strips from left to right, each as columns and pixels (…, rows, columns)."""
        finished, before, after = self.finished_rows(row), self.carried, None
        row_weights = _weights(self._rows, self._scale, self.device)[row][:, None]
        last_row = row == len(self._rows.starts) - 1
        for columns, strip in self._strips(tiles):
            strip *= row_weights
            if before is not None:
                strip[..., : before.shape[-2], :] += before[..., columns].to(self.device)
            if not last_row:
                if after is None:
                    width = self._columns.padded * self._scale
                    after = strip.new_empty((*strip.shape[:-2], strip.shape[-2] - finished, width))
                after[..., columns] = strip[..., finished:, :]
            yield columns, strip[..., :finished, :]
        self.carried = after

    def _strips(self, tiles: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yields strips of columns that are complete, because no further tile of the row adds to them."""
        starts = [start * self._scale for start in self._columns.starts]
        weights = _weights(self._columns, self._scale, self.device)
        unfinished: Tensor | None = None
        for column, tile in enumerate(tiles):
            summed = tile.to(self.device).float() * weights[column]
            if unfinished is not None:
                summed[..., : unfinished.shape[-1]] += unfinished
            left = starts[column]
            right = starts[column + 1] if column + 1 < len(starts) else left + summed.shape[-1]
            unfinished = summed[..., right - left :]
            yield slice(left, right), summed[..., : right - left]


@lru_cache(maxsize=32)
def _weights(side: Side, scale: int, device: torch.device) -> Tensor:
    """Caches the weights on the device, because all frames of a video share them and a copy synchronizes."""
    return side.weights(scale).to(device)


def enlarge_by_tiles(
    image: Tensor, enlarge: Enlarge, scale: int, shape: TileShape, batch: int, wrap: bool = False
) -> Tensor:
    """Upscales images of one size that fit in memory: (B, 3, H, W) -> (B, 3, scale · H, scale · W)."""
    return enlarge_each_by_tiles(image, partial(map, enlarge), scale, shape, batch, wrap)


def enlarge_each_by_tiles(
    image: Tensor, enlarge_each: EnlargeEach, scale: int, shape: TileShape, batch: int, wrap: bool = False
) -> Tensor:
    """Like `enlarge_by_tiles`, but `enlarge_each` may have several batches in flight, even of different tile rows."""
    rows, columns = cut_side(image.shape[-2], shape.rows, wrap), cut_side(image.shape[-1], shape.columns, wrap)
    blender = Blender(rows, columns, scale, image.device)
    bands = (image[..., rows.positions_on(image.device)[top : top + shape.rows.tile], :] for top in rows.starts)
    tiles = iter(enlarged_tiles(bands, columns, enlarge_each, batch))
    whole = image.new_empty((*image.shape[:-2], rows.padded * scale, columns.padded * scale), dtype=torch.float32)
    for row, top in enumerate(rows.starts):
        done = slice(top * scale, top * scale + blender.finished_rows(row))
        for across, strip in blender.blend(row, islice(tiles, len(columns.starts))):
            whole[..., done, across] = strip
    return whole[..., rows.inside(scale), columns.inside(scale)]


def enlarged_tiles(bands: Iterable[Tensor], columns: Side, enlarge_each: EnlargeEach, batch: int) -> Iterable[Tensor]:
    """Yields the upscaled tiles of bands (B, 3, tile height, W), from left to right, computed `batch` at a time."""
    tile, starts, count = columns.cut.tile, columns.starts, 1

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


def bounded_alpha(enlarged: Iterable[Tensor], alpha: Tensor, columns: Side, scale: int) -> Iterator[Tensor]:
    """Clamps each value of the upscaled alpha to the range of the source pixels around it.

    `enlarged` are tiles (1, 3, scale · tile height, scale · tile width) of the source band `alpha` (1, tile height, W).
    The network upscales alpha as a grey image. Where the source is exactly 0 or 1, it returns values that are only
    close to 0 or 1, above all in bf16, so a transparent pixel would be faintly visible. Clamping makes them exact.
    """
    padded = alpha[..., columns.positions_on(alpha.device)]
    # Upscaling moves an edge by less than a source pixel, so the range over the direct neighbours is enough.
    highest, lowest = _max_of_neighbours(padded), -_max_of_neighbours(-padded)
    for left, tile in zip(columns.starts, enlarged, strict=True):
        inside = slice(left, left + columns.cut.tile)
        low, high = (_repeated(bound[..., inside], scale) for bound in (lowest, highest))
        yield torch.clamp(tile.to(alpha.device, torch.float32), low, high)


def bounded_whole_alpha(enlarged: Tensor, alpha: Tensor, scale: int, wrap: bool = False) -> Tensor:
    """Like `bounded_alpha`, for upscaled whole images (B, C, scale · H, scale · W) and their `alpha` (B, 1, H, W)."""
    padded = pad(alpha, (1, 1, 1, 1), mode="circular" if wrap else "replicate")
    highest, lowest = _max_of_neighbours(padded), -_max_of_neighbours(-padded)
    low, high = (_repeated(bound[..., 1:-1, 1:-1], scale) for bound in (lowest, highest))
    return torch.clamp(enlarged, low, high)


def _max_of_neighbours(plane: Tensor) -> Tensor:
    return max_pool2d(plane, 3, stride=1, padding=1)


def _repeated(plane: Tensor, scale: int) -> Tensor:
    return plane.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
