"""PSNR and SSIM as super-resolution papers compute them.

Both are computed on luma of 8-bit images (ITU-R BT.601 in 16…235, like Matlab's `rgb2ycbcr` of floats), with `scale`
pixels cropped at each edge. SSIM uses an 11×11 Gaussian window with σ = 1.5, only where it fits completely. Other
choices change the scores by tenths of a decibel, which is as much as the models in papers differ.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder.metrics import mean_similarity

_PEAK = 255.0
_LUMA = (65.481 / 255, 128.553 / 255, 24.966 / 255)
_WINDOW_PX = 11


@dataclass(frozen=True)
class Scores:
    """PSNR of luma in dB (infinite for equal images) and SSIM of luma."""

    psnr_y_db: float
    ssim_y: float


def score(output: Tensor, truth: Tensor, border_px: int) -> Scores:
    """Scores an 8-bit image (3, H, W) against the true one. Pass the scale as `border_px`, as papers do."""
    if output.shape != truth.shape or output.dtype != torch.uint8 or truth.dtype != torch.uint8:
        raise RedlineError(
            f"scoring needs 8-bit images of one size, not {tuple(output.shape)} of {output.dtype} "
            f"and {tuple(truth.shape)} of {truth.dtype}."
        )
    least = 2 * border_px + _WINDOW_PX
    if min(output.shape[-2:]) < least:
        raise RedlineError(
            f"an image of {output.shape[-1]} × {output.shape[-2]} is too small to score: it needs {least} per side."
        )
    luma = [crop(luma_of(image), border_px) for image in (output, truth)]
    return Scores(psnr(*luma), ssim(*luma))


def luma_of(image: Tensor) -> Tensor:
    """Converts (3, H, W) of uint8 to luma (H, W) in 16…235, float64 and not rounded."""
    red, green, blue = image.double().unbind(0)
    return 16 + red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]


def crop(image: Tensor, border_px: int) -> Tensor:
    height, width = image.shape[-2:]
    return image[..., border_px : height - border_px, border_px : width - border_px]


def psnr(output: Tensor, truth: Tensor) -> float:
    """Returns the PSNR in dB of two images in 0…255."""
    error = float(((output.double() - truth.double()) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(_PEAK**2 / error)


def ssim(output: Tensor, truth: Tensor) -> float:
    """Returns the mean structural similarity of two images (H, W) in 0…255."""
    return mean_similarity(truth[None], output[None], _PEAK)
