"""Pictures moved by a known motion, and how much a film flickers where nothing but that motion changed it.

`came_from` says for each pixel of a frame where it was in the frame before, in pixels from the middle. B: clips.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def positions(height: int, width: int, device: torch.device, finer: int = 1) -> Tensor:
    """(finer·H, finer·W, 2): the middles of pixels, or of their parts, as x and y from the middle of the picture."""
    down = (torch.arange(height * finer, device=device) + 0.5) / finer - height / 2
    across = (torch.arange(width * finer, device=device) + 0.5) / finer - width / 2
    return torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)


def look_up(picture_BCHW: Tensor, places_BHW2: Tensor, beyond: str) -> Tensor:
    """The picture's colours at places given in pixels from its middle; `beyond` its edge it is mirrored or repeated."""
    height, width = picture_BCHW.shape[-2:]
    across, down = places_BHW2.unbind(-1)
    grid = torch.stack((across * (2 / width), down * (2 / height)), dim=-1)
    return F.grid_sample(picture_BCHW, grid, padding_mode=beyond, align_corners=False)


def warp(before_BCHW: Tensor, came_from_BHW2: Tensor) -> Tensor:
    """The frame before, moved to where it should be now."""
    return look_up(before_BCHW, came_from_BHW2, "border")


def warp_error(now_BCHW: Tensor, before_BCHW: Tensor, came_from_BHW2: Tensor, known_BHW: Tensor) -> Tensor:
    """The mean absolute difference, over the pixels whose motion is known; 0 where there are none."""
    difference = (now_BCHW - warp(before_BCHW, came_from_BHW2)).abs().mean(1)
    return (difference * known_BHW).sum() / known_BHW.sum().clamp_min(1)
