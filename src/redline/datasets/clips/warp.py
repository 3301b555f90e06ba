"""Warps images by a known motion, and measures flicker as the warp error between frames.

`came_from` is the position of each pixel in the previous frame, in pixels from the center. B: clips.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def positions(height: int, width: int, device: torch.device, oversampling: int = 1) -> Tensor:
    """Returns x and y of (sub)pixels relative to the image's center, (oversampling·H, oversampling·W, 2)."""
    down = (torch.arange(height * oversampling, device=device) + 0.5) / oversampling - height / 2
    across = (torch.arange(width * oversampling, device=device) + 0.5) / oversampling - width / 2
    return torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)


def look_up(image_BCHW: Tensor, positions_BHW2: Tensor, padding: str) -> Tensor:
    """Samples images at positions in pixels from the image's center; `padding` is a padding mode of `grid_sample`."""
    height, width = image_BCHW.shape[-2:]
    across, down = positions_BHW2.unbind(-1)
    grid = torch.stack((across * (2 / width), down * (2 / height)), dim=-1)
    return F.grid_sample(image_BCHW, grid, padding_mode=padding, align_corners=False)


def warp(before_BCHW: Tensor, came_from_BHW2: Tensor) -> Tensor:
    """Returns the previous frame, warped to the current one."""
    return look_up(before_BCHW, came_from_BHW2, "border")


def warp_error(now_BCHW: Tensor, before_BCHW: Tensor, came_from_BHW2: Tensor, known_BHW: Tensor) -> Tensor:
    """Returns the mean absolute difference over pixels with known motion; 0 if there are no such pixels."""
    difference = (now_BCHW - warp(before_BCHW, came_from_BHW2)).abs().mean(1)
    return (difference * known_BHW).sum() / known_BHW.sum().clamp_min(1)
