"""What is looked at in a frame: its colours, its contrast, its detail and its structure.

Colours, contrast and detail are held against the clean picture where it is known, else against the input: what a
restorer adds to a dark, noisy input depends on what is in the picture, and would look like drift. Figures stay on the
device as numbers of one tensor, so that a thousand frames are looked at without waiting for any.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips import warp_error
from redline.evaluation.drift.cases import CaseFrame

NAMES = (
    "red",  # logarithm of the ratio of the means
    "green",
    "blue",
    "contrast",  # logarithm of the ratio of the spreads
    "detail",  # logarithm of the ratio of what is left beside a blur
    "distance",  # to the input: 0 for the same structure at three scales, 1 for none in common
    "change",  # of the input: mean absolute difference
    "flicker",  # warp error: what changed though the motion says it should not
    "input_flicker",
    "gain_db",  # PSNR against the clean picture, above the input's
    "response",  # of the output to a small change of the input, per change
)
_LEAST = 1e-4
_SCALES = 3
_WINDOW = 8


def figures(moment: CaseFrame, made: Tensor, before: tuple[CaseFrame, Tensor] | None) -> Tensor:
    """All of `NAMES` but the response, which takes another pass; NaN where it cannot be known."""
    seen, unknown = moment.seen, made.new_tensor(float("nan"))
    right = seen if moment.clean is None else moment.clean
    colours = _log_ratio(made.mean((0, 2, 3)), right.mean((0, 2, 3)))
    flicker = input_flicker = unknown
    if before is not None and moment.came_from is not None and moment.known is not None:
        old, old_made = before
        # Where nothing is known (a cut), there is nothing to measure.
        anything = moment.known.sum() > 0
        flicker = torch.where(anything, warp_error(made, old_made, moment.came_from, moment.known), unknown)
        input_flicker = torch.where(anything, warp_error(seen, old.seen, moment.came_from, moment.known), unknown)
    gain = unknown
    if moment.clean is not None:
        gain = _psnr_db(made, moment.clean) - _psnr_db(seen, moment.clean)
    return torch.stack(
        [
            *colours,
            _log_ratio(made.std(), right.std()),
            _log_ratio(_detail(made), _detail(right)),
            structural_distance(made, seen),
            (made - seen).abs().mean(),
            flicker,
            input_flicker,
            gain,
        ]
    )


def structural_distance(one: Tensor, other: Tensor) -> Tensor:
    """One minus the structural similarity of luma, over windows at three scales: 0 for equal pictures."""
    weights = one.new_tensor((0.299, 0.587, 0.114))[:, None, None]
    x, y = ((picture * weights).sum(1, keepdim=True) for picture in (one, other))
    distances = []
    for _ in range(_SCALES):
        if min(x.shape[-2:]) < _WINDOW:
            break
        mean_x, mean_y = (F.avg_pool2d(p, _WINDOW, _WINDOW // 2) for p in (x, y))
        squares = (F.avg_pool2d(p, _WINDOW, _WINDOW // 2) for p in (x * x, y * y, x * y))
        xx, yy, xy = (square - m for square, m in zip(squares, (mean_x**2, mean_y**2, mean_x * mean_y), strict=True))
        alike = (2 * mean_x * mean_y + 1e-4) * (2 * xy + 9e-4)
        distances.append(1 - (alike / ((mean_x**2 + mean_y**2 + 1e-4) * (xx + yy + 9e-4))).mean())
        x, y = (F.avg_pool2d(p, 2) for p in (x, y))
    return torch.stack(distances).mean() if distances else (one - other).abs().mean()


def _detail(picture: Tensor) -> Tensor:
    blurred = F.avg_pool2d(F.pad(picture, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return (picture - blurred).abs().mean()


def _log_ratio(one: Tensor, other: Tensor) -> Tensor:
    return ((one + _LEAST) / (other + _LEAST)).log()


def _psnr_db(seen: Tensor, clean: Tensor) -> Tensor:
    return -10 * (seen - clean).square().mean().clamp_min(1e-10).log10()
