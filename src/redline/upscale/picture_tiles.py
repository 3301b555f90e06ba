"""Tiles of real pictures: what a network is calibrated and judged on."""

from pathlib import Path

import torch
from torch import Tensor

from redline.edges import reflected
from redline.errors import RedlineError
from redline.upscale.pictures import open_picture, to_planes
from redline.upscale.tasks import find_tasks


def tiles_of(folder: Path, tile: int, count: int, seed: int = 0) -> Tensor:
    """`count` tiles (count, 3, tile, tile) at random places, spread over the folder's pictures."""
    pictures = [task.source for task in find_tasks([folder], folder / "unused", 1) if not task.is_film]
    if not pictures:
        raise RedlineError(f"there is no picture in {str(folder)!r}.")
    random = torch.Generator().manual_seed(seed)
    tiles = []
    for index in range(count):
        # Evenly over all of them, so that a folder sorted by subject is not judged by its first one.
        path = pictures[index * len(pictures) // count % len(pictures)]
        with open_picture(path, random_access=True) as picture:
            top, left = (
                int(torch.randint(0, max(side - tile, 0) + 1, (1,), generator=random))
                for side in (picture.height, picture.width)
            )
            rows = picture.rows(top, min(top + tile, picture.height))
        colour = to_planes(rows)[0][:, :, left : left + tile]
        down, right = (reflected(0, tile, side) for side in colour.shape[-2:])
        tiles.append(colour[:, down][:, :, right])
    return torch.stack(tiles)
