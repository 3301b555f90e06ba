"""Scores have the known values, agree with a direct computation, and see what they should not."""

import math

import numpy as np
import pytest
import torch

from redline.errors import RedlineError
from redline.evaluation.super_resolution.scores import luma_of, psnr, score, ssim


def photo(height: int = 40, width: int = 33) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8)


def colour(red: int, green: int, blue: int) -> float:
    return float(luma_of(torch.tensor([red, green, blue], dtype=torch.uint8).view(3, 1, 1)))


def test_luma_is_matlabs() -> None:
    assert colour(0, 0, 0) == 16
    assert colour(255, 255, 255) == pytest.approx(235)
    assert colour(255, 0, 0) == pytest.approx(81.481)
    assert colour(0, 255, 0) == pytest.approx(144.553)
    assert colour(0, 0, 255) == pytest.approx(40.966)


def test_psnr_of_a_known_error() -> None:
    truth = torch.full((8, 9), 100.0)
    assert psnr(truth + 1, truth) == pytest.approx(20 * math.log10(255))
    assert psnr(truth + 16, truth) == pytest.approx(20 * math.log10(255 / 16))
    assert psnr(truth, truth) == math.inf


def test_a_grey_step_of_one_is_219_of_255_on_luma() -> None:
    truth = torch.full((3, 30, 30), 100, dtype=torch.uint8)
    assert score(truth + 1, truth, 4).psnr_y_db == pytest.approx(20 * math.log10(255 / (219 / 255)))


def direct_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Window by window, from the definition: weighted means, variances and covariance."""
    ticks = np.arange(11) - 5
    window = np.exp(-(ticks[:, None] ** 2 + ticks[None, :] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            a, b = x[row : row + 11, column : column + 11], y[row : row + 11, column : column + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
            top = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
            values.append(top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    return float(np.mean(values))


def test_ssim_agrees_with_the_definition() -> None:
    x = torch.rand(19, 23, dtype=torch.float64) * 255
    y = (x + 30 * torch.randn(19, 23, dtype=torch.float64)).clamp(0, 255)
    assert ssim(x, y) == pytest.approx(direct_ssim(x.numpy(), y.numpy()), abs=1e-9)
    assert ssim(x, x) == pytest.approx(1.0)
    assert ssim(x, y) < 0.99


def test_both_scores_are_of_the_inner_luma() -> None:
    truth, output = photo(), photo()
    inner = [luma_of(picture)[4:-4, 4:-4] for picture in (output, truth)]
    seen = score(output, truth, 4)
    assert seen.psnr_y_db == pytest.approx(psnr(*inner))
    assert seen.ssim_y == pytest.approx(direct_ssim(inner[0].numpy(), inner[1].numpy()), abs=1e-9)


def test_the_border_does_not_count_and_what_is_inside_does() -> None:
    truth = photo()
    spoiled = truth.clone()
    spoiled[:, :4] = 255 - spoiled[:, :4]
    spoiled[:, :, -4:] = 255 - spoiled[:, :, -4:]
    assert score(spoiled, truth, 4).psnr_y_db == math.inf
    assert score(spoiled, truth, 3).psnr_y_db < 40


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(RedlineError, match="one size"):
        score(photo(40, 33), photo(40, 34), 4)
    with pytest.raises(RedlineError, match="8-bit"):
        score(photo().float(), photo(), 4)
    with pytest.raises(RedlineError, match="too small"):
        score(photo(18, 40), photo(18, 40), 4)
