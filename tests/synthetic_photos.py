"""Pictures with edges, texture and flat parts, made afresh: something that a small model can learn to sharpen."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def synthetic_photo(height: int, width: int, seed: int) -> Tensor:
    """Overlapping discs and bars of random colours over a gradient, bytes of (3, H, W)."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture = some(3, 1, 1) * 255 * (0.5 + 0.5 * across / width)
    for _ in range(height * width // 250):
        top, left = float(some(1)) * height, float(some(1)) * width
        if some(1) < 0.5:
            inside = (down - top) ** 2 + (across - left) ** 2 < (2 + 10 * float(some(1))) ** 2
        else:
            slope = 4 * float(some(1)) - 2
            inside = ((down - top) * slope + (across - left)).abs() < 2
            inside &= (down - top).abs() < 20
        picture = torch.where(inside, some(3, 1, 1) * 255, picture)
    return picture.round().clamp(0, 255).to(torch.uint8)


def save_photo(path: Path, picture: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(path)


def save_synthetic_photos(folder: Path, count: int, height: int = 96, width: int = 117, seed: int = 0) -> Path:
    for index in range(count):
        save_photo(folder / f"{index}.png", synthetic_photo(height, width, 1000 * seed + index))
    return folder
