"""A fresh DRCT that starts as an interpolation is one, wherever its convolutions do not look beyond the edge."""

import pytest
import torch
from torch.nn import functional as F

from redline.errors import RedlineError
from redline.models.drct import Drct, DrctConfig
from redline.training.interpolating_start import linear_kernels, start_as_interpolation


def fresh(scale: int, features: int = 8) -> Drct:
    return Drct(DrctConfig.of(scale, 1, 12, 6, features=features, window=4))


@pytest.mark.parametrize("scale", [2, 3])
def test_one_step_is_linear_interpolation(scale: int) -> None:
    model = fresh(scale)
    picture = torch.rand(2, 3, 16, 12)
    before = model(picture)
    start_as_interpolation(model)
    seen, expected = model(picture), F.interpolate(picture, scale_factor=scale, mode="bilinear")
    inner = (..., slice(2 * scale, -2 * scale), slice(2 * scale, -2 * scale))
    torch.testing.assert_close(seen[inner], expected[inner], atol=1e-5, rtol=0)
    assert (before[inner] - expected[inner]).abs().max() > 0.1


def test_two_steps_interpolate_twice() -> None:
    model = fresh(4)
    start_as_interpolation(model)
    picture = torch.rand(1, 3, 12, 16)
    expected = picture
    for _ in range(2):
        expected = F.interpolate(expected, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(model(picture)[..., 12:-12, 12:-12], expected[..., 12:-12, 12:-12], atol=1e-5, rtol=0)


def test_every_weight_learns() -> None:
    model = fresh(4)
    start_as_interpolation(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # what feeds a weight of zero learns from the second step on
        optimizer.zero_grad()
        (model(torch.rand(2, 3, 8, 8)) - torch.rand(2, 3, 32, 32)).abs().mean().backward()
        optimizer.step()
    still = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@pytest.mark.parametrize("factor", [2, 3])
def test_kernels_sum_to_one(factor: int) -> None:
    kernels = linear_kernels(factor)
    assert kernels.shape == (factor**2, 3, 3)
    torch.testing.assert_close(kernels.sum((1, 2)), torch.ones(factor**2))


def test_too_few_features_are_refused() -> None:
    with pytest.raises(RedlineError, match="features = .* must be at least 6"):
        start_as_interpolation(fresh(2, features=4))
