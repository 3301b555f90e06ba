"""Tiles cut from real images, on which networks are calibrated and compared."""

from math import ceil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import RedlineError
from redline.upscale.images.colour import to_planes
from redline.upscale.images.source import open_image
from redline.upscale.tasks import find_tasks
from redline.video.padding_index import reflected

_JUDGED, _JUDGED_PX = 2, 64


def tiles_of(folder: Path, tile: int, count: int, seed: int = 0) -> Tensor:
    """Returns `count` tiles (count, 3, tile, tile) at random positions, spread over the images of the folder."""
    found = find_tasks([folder], folder / "unused", 1)
    images = [task.source for task in found if not task.is_video and not task.problem]
    if not images:
        raise RedlineError(f"no image found in {str(folder)!r}.")
    random = torch.Generator().manual_seed(seed)
    tiles = []
    for index in range(count):
        # Spread over all images, because folders are often sorted by subject.
        path = images[index * len(images) // count % len(images)]
        with open_image(path, random_access=True) as image:
            top, left = (
                int(torch.randint(0, max(side - tile, 0) + 1, (1,), generator=random))
                for side in (image.height, image.width)
            )
            rows = image.rows(top, min(top + tile, image.height))
        colour = to_planes(rows)[0][:, :, left : left + tile]
        down, right = (reflected(0, tile, side) for side in colour.shape[-2:])
        tiles.append(colour[:, down][:, :, right])
    return torch.stack(tiles)


def squares_to_judge(tiles: Tensor, window: int) -> Tensor:
    """Returns the two most detailed squares of these tiles (N, 3, H, W), about 64 pixels a side."""
    height, width = (min(side, ceil(_JUDGED_PX / window) * window) for side in tiles.shape[-2:])
    across, down = tiles.diff(dim=-1).abs().mean(1), tiles.diff(dim=-2).abs().mean(1)
    # How much each pixel differs from its right and its lower neighbour.
    detail = F.pad(across, (0, 1)) + F.pad(down, (0, 0, 0, 1))
    sums = F.avg_pool2d(detail[:, None], (height, width), stride=(max(height // 2, 1), max(width // 2, 1)))[:, 0]
    squares = []
    for place in sums.flatten().topk(min(_JUDGED, sums.numel())).indices.tolist():
        tile, rest = divmod(place, sums[0].numel())
        top, left = (
            index * max(side // 2, 1) for index, side in zip(divmod(rest, sums.shape[2]), (height, width), strict=True)
        )
        squares.append(tiles[tile, :, top : top + height, left : left + width])
    return torch.stack(squares)
