"""PSNR and SSIM as super-resolution papers compute them.

On 8-bit pictures, on luma only (ITU-R BT.601 in 16…235, as Matlab's `rgb2ycbcr` of floats), with `scale` pixels cut off
at each edge; SSIM with an 11×11 Gaussian of σ = 1.5 wherever it fits whole. Any other choice moves the figures by
tenths of a decibel, which is what papers differ by.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import RedlineError

_PEAK = 255.0
_LUMA = (65.481 / 255, 128.553 / 255, 24.966 / 255)
_WINDOW_PX, _SIGMA_PX = 11, 1.5


@dataclass(frozen=True)
class Scores:
    """PSNR of luma in dB (infinite for equal pictures) and SSIM of luma."""

    psnr_y_db: float
    ssim_y: float


def score(output: Tensor, truth: Tensor, border_px: int) -> Scores:
    """Scores of an 8-bit picture (3, H, W) against the true one; `border_px` is the scale, as papers have it."""
    if output.shape != truth.shape or output.dtype != torch.uint8 or truth.dtype != torch.uint8:
        raise RedlineError(
            f"scores compare 8-bit pictures of one size, not {tuple(output.shape)} of {output.dtype} "
            f"and {tuple(truth.shape)} of {truth.dtype}."
        )
    least = 2 * border_px + _WINDOW_PX
    if min(output.shape[-2:]) < least:
        raise RedlineError(
            f"a picture of {output.shape[-1]} × {output.shape[-2]} is too small to score: {least} a side."
        )
    luma = [crop(luma_of(picture), border_px) for picture in (output, truth)]
    return Scores(psnr(*luma), ssim(*luma))


def luma_of(picture: Tensor) -> Tensor:
    """(3, H, W) of 8 bits to luma (H, W) in 16…235, float64 and not rounded."""
    red, green, blue = picture.double().unbind(0)
    return 16 + red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]


def crop(picture: Tensor, border_px: int) -> Tensor:
    height, width = picture.shape[-2:]
    return picture[..., border_px : height - border_px, border_px : width - border_px]


def psnr(output: Tensor, truth: Tensor) -> float:
    """In dB, of two pictures in 0…255."""
    error = float(((output.double() - truth.double()) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(_PEAK**2 / error)


def ssim(output: Tensor, truth: Tensor) -> float:
    """Mean structural similarity of two pictures (H, W) in 0…255 (Wang et al., 2004)."""
    x, y = output.double(), truth.double()
    c1, c2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
    mean_x, mean_y, of_xx, of_yy, of_xy = _blurred(torch.stack((x, y, x * x, y * y, x * y)))
    variances = (of_xx - mean_x**2) + (of_yy - mean_y**2)
    covariance = of_xy - mean_x * mean_y
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((similarity / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))).mean())


def _blurred(pictures: Tensor) -> Tensor:
    """(N, H, W) under the Gaussian, rows and then columns, wherever it fits whole."""
    ticks = torch.arange(_WINDOW_PX, dtype=torch.float64, device=pictures.device) - _WINDOW_PX // 2
    line = torch.exp(-(ticks**2) / (2 * _SIGMA_PX**2))
    line = line / line.sum()
    down = F.conv2d(pictures[:, None], line.view(1, 1, -1, 1))
    return F.conv2d(down, line.view(1, 1, 1, -1))[:, 0]
