"""The metrics of a frame: colours, contrast, detail, structure, flicker and gain.

Colours, contrast and detail are compared with the clean image if it is known, else with the input. The metrics of a
frame stay on the device in one tensor, so that measuring a frame does not synchronize with the device.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.datasets.clips import warp_error
from redline.evaluation.drift.cases import CaseFrame

NAMES = (
    "red",  # logarithm of (mean of the output / mean of the reference)
    "green",
    "blue",
    "contrast",  # logarithm of the ratio of the standard deviations of output and reference
    "detail",  # logarithm of the ratio of the mean absolute differences from a blurred copy
    "distance",  # structural distance to the input: 0 if the structure is equal, 1 if it has nothing in common
    "change",  # mean absolute difference from the input
    "flicker",  # warp error: changes that the known motion does not explain
    "input_flicker",
    "gain_db",  # PSNR against the clean image, minus that of the input
    "response",  # change of the output divided by a small change of the input
)
_LEAST = 1e-4
_SCALES = 3
_WINDOW = 8


def frame_metrics(shown: CaseFrame, output: Tensor, before: tuple[CaseFrame, Tensor] | None) -> Tensor:
    """Returns all of `NAMES` except `response`, which needs a second forward pass; NaN for unknown metrics."""
    frame, unknown = shown.frame, output.new_tensor(float("nan"))
    reference = frame if shown.clean is None else shown.clean
    colours = _log_ratio(output.mean((0, 2, 3)), reference.mean((0, 2, 3)))
    flicker = input_flicker = unknown
    if before is not None and shown.came_from is not None and shown.known is not None:
        old, old_output = before
        # After a cut no motion is known.
        is_known = shown.known.sum() > 0
        flicker = torch.where(is_known, warp_error(output, old_output, shown.came_from, shown.known), unknown)
        input_flicker = torch.where(is_known, warp_error(frame, old.frame, shown.came_from, shown.known), unknown)
    gain = unknown
    if shown.clean is not None:
        gain = _psnr_db(output, shown.clean) - _psnr_db(frame, shown.clean)
    return torch.stack(
        [
            *colours,
            _log_ratio(output.std(), reference.std()),
            _log_ratio(_detail(output), _detail(reference)),
            structural_distance(output, frame),
            (output - frame).abs().mean(),
            flicker,
            input_flicker,
            gain,
        ]
    )


def structural_distance(one: Tensor, other: Tensor) -> Tensor:
    """Returns 1 − SSIM of luma, averaged over windows at three scales; 0 for equal images."""
    weights = one.new_tensor((0.299, 0.587, 0.114))[:, None, None]
    x, y = ((image * weights).sum(1, keepdim=True) for image in (one, other))
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


def _detail(image: Tensor) -> Tensor:
    blurred = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return (image - blurred).abs().mean()


def _log_ratio(one: Tensor, other: Tensor) -> Tensor:
    return ((one + _LEAST) / (other + _LEAST)).log()


def _psnr_db(image: Tensor, clean: Tensor) -> Tensor:
    return -10 * (image - clean).square().mean().clamp_min(1e-10).log10()
