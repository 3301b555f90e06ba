"""Rows of samples as planes for a model, and back; on any device.

Colour under transparent pixels is arbitrary, often black, and would bleed into the edges of what is visible: it is
multiplied by alpha before a model sees it, and divided by the enlarged alpha afterwards.

float32 holds every 16-bit sample with room to spare: n/65535 times 65535 rounds to n for all of them.
"""

import numpy as np
import torch
from torch import Tensor

from redline.upscale.images.errors import ImageError

# Less than half of the smallest alpha of a 16-bit image: such a pixel is written as fully transparent.
_INVISIBLE = 0.4 / 65535
_STRIP_BYTES = 64 * 2**20


def to_planes(rows: np.ndarray | Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows (H, W, 1…4) as colour (3, H, W) and alpha (1, H, W) or None, float32 in [0, 1]; grey is repeated."""
    samples = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    samples = samples.to(device) if device is not None else samples
    if samples.ndim != 3 or not 1 <= samples.shape[2] <= 4 or samples.dtype not in (torch.uint8, torch.uint16):
        raise ImageError(f"rows of shape {tuple(samples.shape)} and type {samples.dtype} are no image.")
    if samples.dtype == torch.uint16:
        # Devices convert 16-bit numbers as signed ones, if at all as unsigned.
        planes = (samples.view(torch.int16).int() & 0xFFFF).permute(2, 0, 1).float() / 65535
    else:
        planes = samples.permute(2, 0, 1).float() / 255
    has_alpha = len(planes) in (2, 4)
    colour = planes[:-1] if has_alpha else planes
    alpha = planes[-1:].contiguous() if has_alpha else None
    return colour.expand(3, -1, -1).contiguous(), alpha


def from_planes(colour: Tensor, alpha: Tensor | None, channels: int, bits: int) -> Tensor:
    """Planes in [0, 1] as rows (H, W, channels) of uint8 or uint16, clipped and rounded; grey is the mean of three."""
    if (channels in (2, 4)) != (alpha is not None) or channels not in (1, 2, 3, 4) or bits not in (8, 16):
        raise ImageError(
            f"planes {'without' if alpha is None else 'with'} alpha make no {channels} channels of {bits} bits."
        )
    height, width = colour.shape[-2:]
    narrow = torch.uint8 if bits == 8 else torch.int16
    rows = torch.empty((height, width, channels), dtype=narrow, device=colour.device)
    # What is made on the way is several times the rows: of a wide image's band that would be gigabytes.
    step = max(1, _STRIP_BYTES // max(1, 16 * width))
    for top in range(0, height, step):
        strip = slice(top, top + step)
        part = colour[:, strip].mean(0, keepdim=True) if channels < 3 else colour[:, strip]
        planes = part if alpha is None else torch.cat([part, alpha[:, strip]])
        levels = (planes.float().clamp(0, 1) * (2**bits - 1)).round_().permute(1, 2, 0)
        # Sixteen bits as a signed number, which every device can narrow to.
        rows[strip] = levels if bits == 8 else (levels.int() ^ 0x8000) - 0x8000
    return rows if bits == 8 else rows.view(torch.uint16)


def premultiply(colour: Tensor, alpha: Tensor) -> Tensor:
    """Colour weighted by how visible it is."""
    return colour * alpha


def unpremultiply(colour: Tensor, alpha: Tensor) -> Tensor:
    """Colour at full strength again; black where nothing can be seen of it."""
    alpha = alpha.clamp(max=1)
    visible = alpha > _INVISIBLE
    return torch.where(visible, colour / torch.where(visible, alpha, 1), 0).clamp(0, 1)
