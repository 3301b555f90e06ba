"""Scores of an enlarging model over a test set, as papers give them: whole pictures, 8 bits, luma.

A model is anything that takes (1, 3, H, W) in [0, 1] and gives it `scale` times larger. One that works in windows gets
pictures that are mirrored to a multiple of its window at the right and bottom; what that adds is cut off again.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redline.datasets.bicubic import resize, to_8_bits
from redline.errors import RedlineError
from redline.evaluation.super_resolution.pairs import PairFiles
from redline.evaluation.super_resolution.scores import Scores, score
from redline.video.padding_index import reflected

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PictureScores:
    """One picture's scores; `made` when its small picture was made by the bicubic and not read."""

    name: str
    width_px: int
    height_px: int
    psnr_y_db: float
    ssim_y: float
    made: bool


@dataclass(frozen=True)
class Evaluation:
    scale: int
    pictures: tuple[PictureScores, ...]

    @property
    def mean(self) -> Scores:
        """The mean of the pictures' scores, each counting the same whatever its size."""
        return Scores(
            statistics.fmean(picture.psnr_y_db for picture in self.pictures),
            statistics.fmean(picture.ssim_y for picture in self.pictures),
        )


def evaluate(
    model: Model,
    pairs: Iterable[PairFiles],
    scale: int,
    window: int = 1,
    device: str | torch.device = "cpu",
    tell: Callable[[PictureScores], None] = lambda picture: None,
) -> Evaluation:
    """Enlarges every small picture and scores it against its large one."""
    seen = []
    for files in pairs:
        pair = files.read(scale)
        height, width = pair.high.shape[-2:]
        scores = score(enlarge(model, pair.low, scale, window, device), pair.high.to(device), border_px=scale)
        seen.append(PictureScores(pair.name, width, height, scores.psnr_y_db, scores.ssim_y, pair.made))
        tell(seen[-1])
    if not seen:
        raise RedlineError("there is no picture to evaluate the model on.")
    return Evaluation(scale, tuple(seen))


def enlarge(model: Model, low: Tensor, scale: int, window: int = 1, device: str | torch.device = "cpu") -> Tensor:
    """One picture of bytes (3, H, W), enlarged to bytes (3, scale·H, scale·W)."""
    height, width = low.shape[-2:]
    rows = reflected(0, math.ceil(height / window) * window, height)
    columns = reflected(0, math.ceil(width / window) * window, width)
    padded = low[:, rows][:, :, columns].to(device)
    with torch.no_grad():
        output = model(padded[None].float() / 255)[0].float()
    expected = (3, len(rows) * scale, len(columns) * scale)
    if tuple(output.shape) != expected:
        raise RedlineError(f"the model gave {tuple(output.shape)} where ×{scale} should give {expected}.")
    if not torch.isfinite(output).all():
        raise RedlineError("the model's output holds values that are not finite.")
    return to_8_bits(output[:, : height * scale, : width * scale] * 255)


def bicubic_model(scale: int) -> Model:
    """What every model has to beat."""
    return partial(resize, scale=scale)
