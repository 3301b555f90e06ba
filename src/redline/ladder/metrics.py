"""The metrics that gates limit. Each compares an output with its reference, which are both lists of tensors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import GateError

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Metric:
    """A measure of how far an output is from its reference, and which direction is better."""

    name: str
    measure: Callable[[Tensors, Tensors], float]
    better: str  # "lower" or "higher"
    unit: str = ""


def _floats(tensors: Tensors) -> list[Tensor]:
    floats = [t.detach().to(torch.float64).flatten() for t in tensors if t.is_floating_point()]
    if not floats:
        raise GateError(
            "this metric compares floating-point outputs, but there is none: use Gate('top1', …) for tokens."
        )
    return floats


def _flat(reference: Tensors, output: Tensors) -> tuple[Tensor, Tensor]:
    return torch.cat(_floats(reference)), torch.cat(_floats(output))


# A tensor whose RMS is below this share of the RMS of all tensors is mostly rounding error, so it is not judged alone,
# only together with all others. An example is the gradient of a bias before a norm layer: exact arithmetic gives zero.
_LEAST_GRADIENT, _LEAST_OUTPUT = 1e-4, 1e-6


def _worst_tensor(
    measure: Callable[[Tensors, Tensors], float], better: str, least_share: float = _LEAST_OUTPUT
) -> Callable[[Tensors, Tensors], float]:
    """Returns a metric: `measure` of the worst tensor, so that a large correct tensor cannot hide a small wrong one."""

    def over_outputs(reference: Tensors, output: Tensors) -> float:
        pairs = [(e, s) for e, s in zip(reference, output, strict=True) if e.is_floating_point()]
        flat = torch.cat(_floats(reference))
        least = least_share * float(flat.norm()) / math.sqrt(flat.numel())
        large = [(e, s) for e, s in pairs if float(e.detach().double().norm()) > least * math.sqrt(max(e.numel(), 1))]
        values = [measure([e], [s]) for e, s in large] + [measure(reference, output)]
        # torch's min and max propagate NaN, Python's do not.
        return float((torch.max if better == "lower" else torch.min)(torch.tensor(values, dtype=torch.float64)))

    return over_outputs


def relative_error(reference: Tensors, output: Tensors) -> float:
    """Returns ‖output − reference‖ / ‖reference‖."""
    expected, seen = _flat(reference, output)
    return float((seen - expected).norm() / expected.norm().clamp_min(1e-300))


def max_error(reference: Tensors, output: Tensors) -> float:
    expected, seen = _flat(reference, output)
    return float((seen - expected).abs().max())


def cosine(reference: Tensors, output: Tensors) -> float:
    expected, seen = _flat(reference, output)
    return float(torch.dot(expected, seen) / (expected.norm() * seen.norm()).clamp_min(1e-300))


def psnr(reference: Tensors, output: Tensors) -> float:
    """Returns the PSNR in dB. The peak is the range of the reference, so that the scale of the values has no effect."""
    expected, seen = _flat(reference, output)
    return _decibels(_peak(expected), float(((seen - expected) ** 2).mean()))


def image_psnr(reference: Tensors, output: Tensors) -> float:
    """Returns the PSNR in dB of the worst image. The peak is 1, not the range, which is tiny for a uniform image."""
    values = []
    for expected, seen in zip(reference, output, strict=True):
        if expected.ndim >= 3 and expected.is_floating_point():
            images = zip(*(t.double().reshape(-1, *t.shape[-3:]) for t in (expected, seen)), strict=True)
            values += [_decibels(1.0, float(((a - b) ** 2).mean())) for a, b in images]
    if not values:
        raise GateError("image_psnr compares images (outputs with at least three dimensions), but there is none.")
    return float(torch.tensor(values, dtype=torch.float64).min())


def _decibels(peak: float, error: float) -> float:
    # A perfect match would have an infinite PSNR; it gets 200 dB (fp32 rounding errors alone give about 150 dB).
    return 200.0 if error == 0 else 10 * math.log10(peak**2 / error) if math.isfinite(error) else math.nan


def _peak(expected: Tensor) -> float:
    """Returns the range of the values; for a constant tensor its absolute value, and for zeros 1."""
    return float(expected.max() - expected.min()) or float(expected.abs().max()) or 1.0


def ssim(reference: Tensors, output: Tensors) -> float:
    """Returns the mean structural similarity of the worst 4-D output, with an 11×11 Gaussian window of σ = 1.5."""
    scores = [
        mean_similarity(expected.flatten(0, 1), seen.flatten(0, 1), _peak(expected.double()))
        for expected, seen in zip(reference, output, strict=True)
        if expected.ndim == 4 and expected.is_floating_point()
    ]
    if not scores:
        raise GateError("ssim compares images (4-D floating-point outputs), but the workload has none.")
    return min(scores)


def mean_similarity(expected: Tensor, seen: Tensor, peak: float) -> float:
    """Returns the mean structural similarity of images (N, H, W) with values up to `peak` (Wang et al., 2004).

    The window is Gaussian, 11×11 with σ = 1.5 or as large as the images, and is used only where it fits completely.
    """
    x, y = expected.double(), seen.double()
    size = min(11, *x.shape[-2:])
    ticks = torch.arange(size, dtype=torch.float64, device=x.device) - (size - 1) / 2
    line = torch.exp(-(ticks**2) / (2 * 1.5**2))
    line = line / line.sum()
    down = F.conv2d(torch.stack((x, y, x * x, y * y, x * y)).flatten(0, 1)[:, None], line.view(1, 1, -1, 1))
    mean_x, mean_y, of_xx, of_yy, of_xy = F.conv2d(down, line.view(1, 1, 1, -1)).unflatten(0, (5, -1))
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    variances = (of_xx - mean_x**2) + (of_yy - mean_y**2)
    similarity = (2 * mean_x * mean_y + c1) * (2 * (of_xy - mean_x * mean_y) + c2)
    return float((similarity / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))).mean())


def _logits(tensors: Tensors) -> list[Tensor]:
    rows = [t.detach() for t in tensors if t.ndim >= 2]
    if not rows:
        raise GateError("this metric compares logits (outputs with at least two dimensions), but there are none.")
    return rows[:1]


def top1(reference: Tensors, output: Tensors) -> float:
    """Returns the share of rows of the first output with the same argmax; integer outputs are compared as tokens."""
    if not reference[0].is_floating_point():
        return float((reference[0] == output[0]).double().mean())
    expected, seen = _logits(reference)[0], _logits(output)[0]
    return float((expected.argmax(-1) == seen.argmax(-1)).double().mean())


def agreement(reference: Tensors, output: Tensors) -> float:
    """Returns the share of equal entries in the worst integer output."""
    pairs = [(e, s) for e, s in zip(reference, output, strict=True) if not e.is_floating_point() and e.numel()]
    if not pairs:
        raise GateError("agreement compares integer outputs, but there is none.")
    return min(float((e == s).double().mean()) for e, s in pairs)


def kl_divergence(reference: Tensors, output: Tensors) -> float:
    """Returns the mean KL(reference ‖ output) of the softmax of the first output, in nats."""
    expected, seen = (x[0].double().log_softmax(-1) for x in (_logits(reference), _logits(output)))
    return float((expected.exp() * (expected - seen)).sum(-1).mean())


def loss_difference(reference: Tensors, output: Tensors) -> float:
    """Returns the largest relative difference of a loss; the first tensor holds the losses of the judged steps."""
    expected, seen = reference[0].double(), output[0].double()
    return float(((seen - expected).abs() / expected.abs().clamp_min(1e-12)).max())


def gradient_difference(reference: Tensors, output: Tensors) -> float:
    """Returns the largest relative error of a gradient of the first step; skips the first tensor, the losses."""
    return _worst_tensor(relative_error, "lower", _LEAST_GRADIENT)(reference[1:], output[1:])


METRICS = {
    metric.name: metric
    for metric in (
        Metric("relative_error", _worst_tensor(relative_error, "lower"), "lower"),
        Metric("max_error", max_error, "lower"),
        Metric("cosine", _worst_tensor(cosine, "higher"), "higher"),
        Metric("psnr", _worst_tensor(psnr, "higher"), "higher", "dB"),
        Metric("image_psnr", image_psnr, "higher", "dB"),
        Metric("ssim", ssim, "higher"),
        Metric("top1", top1, "higher"),
        Metric("agreement", agreement, "higher"),
        Metric("kl_divergence", kl_divergence, "lower", "nat"),
        Metric("loss_difference", loss_difference, "lower"),
        Metric("gradient_difference", gradient_difference, "lower"),
    )
}
