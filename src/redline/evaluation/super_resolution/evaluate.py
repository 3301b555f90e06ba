"""Scores a super-resolution model on a test set as papers do: whole images, 8 bits, luma.

A model takes (1, 3, H, W) in [0, 1] and returns an image `scale` times as large. For a windowed model, images are
padded by reflection to a multiple of the window at the right and bottom, and the result is cropped.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from redline.datasets.bicubic import resize, to_8_bits
from redline.errors import RedlineError
from redline.evaluation.super_resolution.pairs import PairFiles, find_pairs
from redline.evaluation.super_resolution.scores import Scores, score
from redline.machine.machine import resolve_device
from redline.models.drct import load_drct
from redline.video.padding_index import reflected

Model = Callable[[Tensor], Tensor]
BICUBIC = "bicubic"
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class ImageScores:
    """The scores of one image. `made` is True if its small image was not read, but made by bicubic downscaling."""

    name: str
    width_px: int
    height_px: int
    psnr_y_db: float
    ssim_y: float
    made: bool


@dataclass(frozen=True)
class Evaluation:
    scale: int
    images: tuple[ImageScores, ...]

    @property
    def mean(self) -> Scores:
        """The mean over images, independent of their sizes."""
        return Scores(
            statistics.fmean(image.psnr_y_db for image in self.images),
            statistics.fmean(image.ssim_y for image in self.images),
        )


def evaluate(
    model: Model,
    pairs: Iterable[PairFiles],
    scale: int,
    window: int = 1,
    device: str | torch.device = "cpu",
    tell: Callable[[ImageScores], None] = lambda _scores: None,
) -> Evaluation:
    """Upscales the small image of every pair and scores it against the large one."""
    seen = []
    for files in pairs:
        pair = files.read(scale)
        height, width = pair.high.shape[-2:]
        scores = score(enlarge(model, pair.low, scale, window, device), pair.high.to(device), border_px=scale)
        seen.append(ImageScores(pair.name, width, height, scores.psnr_y_db, scores.ssim_y, pair.made))
        tell(seen[-1])
    if not seen:
        raise RedlineError("there is no image to evaluate the model on.")
    return Evaluation(scale, tuple(seen))


def evaluate_super_resolution(
    weights: str | Path,
    folder: str | Path,
    scale: int | None = None,
    *,
    precision: str = "fp32",
    device: str = "auto",
    progress: Callable[[ImageScores | None, int, int], None] = lambda _scores, _done, _total: None,
) -> Evaluation:
    """Scores DRCT weights, or `"bicubic"`, on the images of a folder (see `find_pairs` for its layout).

    Args:
        weights: A weight file, or the word `"bicubic"`, which needs a scale.
        folder: High-resolution images, optionally with low-resolution ones.
        scale: The upscaling factor. Weights are for one factor only; another value raises RedlineError.
        precision: `"fp32"` or `"bf16"` (autocast).
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        progress: Called with the scores of an image (None in the first call), the number of completed images, and the
            total.

    >>> evaluation = evaluate_super_resolution("bicubic", "photos", scale=2, device="cpu")
    >>> len(evaluation.images), evaluation.mean.psnr_y_db > 15
    (2, True)
    """
    if precision not in PRECISIONS:
        raise RedlineError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}.")
    target = torch.device(resolve_device(device))
    pairs = find_pairs(folder)
    model, scale, window = _load_model(str(weights), scale, target)
    done = 0
    progress(None, done, len(pairs))

    def tell(scores: ImageScores) -> None:
        nonlocal done
        done += 1
        progress(scores, done, len(pairs))

    with torch.autocast(target.type, torch.bfloat16) if precision == "bf16" else nullcontext():
        return evaluate(model, pairs, scale, window, target, tell)


def _load_model(weights: str, scale: int | None, device: torch.device) -> tuple[Model, int, int]:
    if weights == BICUBIC:
        if scale is None or scale < 1:
            raise RedlineError("bicubic needs a scale: add, for example, --scale 4.")
        return bicubic_model(scale), scale, 1
    model = load_drct(weights).to(device)
    if scale not in (None, model.config.scale):
        raise RedlineError(f"{weights!r} is for ×{model.config.scale}, not ×{scale}: leave out --scale.")
    return model, model.config.scale, model.config.window


def enlarge(model: Model, low: Tensor, scale: int, window: int = 1, device: str | torch.device = "cpu") -> Tensor:
    """Upscales one image (3, H, W) of uint8 to (3, scale·H, scale·W) of uint8."""
    height, width = low.shape[-2:]
    rows = reflected(0, math.ceil(height / window) * window, height)
    columns = reflected(0, math.ceil(width / window) * window, width)
    padded = low[:, rows][:, :, columns].to(device)
    with torch.no_grad():
        output = model(padded[None].float() / 255)[0].float()
    expected = (3, len(rows) * scale, len(columns) * scale)
    if tuple(output.shape) != expected:
        raise RedlineError(f"the output of the model has shape {tuple(output.shape)}, not {expected} as for ×{scale}.")
    if not torch.isfinite(output).all():
        raise RedlineError("the output of the model has values that are not finite.")
    return to_8_bits(output[:, : height * scale, : width * scale] * 255)


def bicubic_model(scale: int) -> Model:
    """Returns the baseline that every model should beat."""
    return partial(resize, scale=scale)
