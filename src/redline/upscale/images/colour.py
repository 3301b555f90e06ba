"""Converts rows of samples to planes for a model and back, on any device.

The colour of transparent pixels is arbitrary, often black, and would bleed into visible edges. Therefore colour is
multiplied by alpha before the model, and divided by the upscaled alpha afterwards.

float32 is exact for 16-bit samples: n/65535 · 65535 rounds to n for all of them.
"""

import numpy as np
import torch
from torch import Tensor

from redline.upscale.images.formats import ImageError

# Alpha up to this value counts as fully transparent, because it is rounded to 0 even in 16 bits.
_INVISIBLE = 0.4 / 65535
_STRIP_BYTES = 64 * 2**20


def to_planes(rows: np.ndarray | Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor | None]:
    """Converts rows (H, W, 1…4) to RGB (3, H, W), repeating grey, and alpha (1, H, W) or None; float32 in [0, 1]."""
    samples = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    samples = samples.to(device) if device is not None else samples
    if samples.ndim != 3 or not 1 <= samples.shape[2] <= 4 or samples.dtype not in (torch.uint8, torch.uint16):
        raise ImageError(f"rows of shape {tuple(samples.shape)} and dtype {samples.dtype} are not an image.")
    if samples.dtype == torch.uint16:
        # Not all devices can convert uint16, so it goes through int16.
        planes = (samples.view(torch.int16).int() & 0xFFFF).permute(2, 0, 1).float() / 65535
    else:
        planes = samples.permute(2, 0, 1).float() / 255
    has_alpha = len(planes) in (2, 4)
    colour = planes[:-1] if has_alpha else planes
    alpha = planes[-1:].contiguous() if has_alpha else None
    return colour.expand(3, -1, -1).contiguous(), alpha


def from_planes(colour: Tensor, alpha: Tensor | None, channels: int, bits: int) -> Tensor:
    """Clamps and rounds planes in [0, 1] to rows (H, W, channels) of uint8 or uint16; for grey, averages RGB."""
    if (channels in (2, 4)) != (alpha is not None) or channels not in (1, 2, 3, 4) or bits not in (8, 16):
        raise ImageError(
            f"planes {'without' if alpha is None else 'with'} alpha cannot be converted to {channels} channels of "
            f"{bits} bits."
        )
    height, width = colour.shape[-2:]
    narrow = torch.uint8 if bits == 8 else torch.int16
    rows = torch.empty((height, width, channels), dtype=narrow, device=colour.device)
    # Works in strips, because the intermediate tensors of a wide band would take gigabytes.
    step = max(1, _STRIP_BYTES // max(1, 16 * width))
    for top in range(0, height, step):
        strip = slice(top, top + step)
        part = colour[:, strip].mean(0, keepdim=True) if channels < 3 else colour[:, strip]
        planes = part if alpha is None else torch.cat([part, alpha[:, strip]])
        levels = (planes.float().clamp(0, 1) * (2**bits - 1)).round_().permute(1, 2, 0)
        # Through int16, because not all devices can convert to uint16.
        rows[strip] = levels if bits == 8 else (levels.int() ^ 0x8000) - 0x8000
    return rows if bits == 8 else rows.view(torch.uint16)


def unpremultiply(colour: Tensor, alpha: Tensor) -> Tensor:
    """Divides colour by alpha; fully transparent pixels become black."""
    alpha = alpha.clamp(max=1)
    visible = alpha > _INVISIBLE
    return torch.where(visible, colour / torch.where(visible, alpha, 1), 0).clamp(0, 1)
