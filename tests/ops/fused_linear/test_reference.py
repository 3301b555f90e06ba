"""Tests the reference against torch's LayerNorm, Linear, GELU and leaky ReLU."""

from collections.abc import Callable

import pytest
import torch

from redline.ops.fused_linear import fused_linear, moments

Agrees = Callable[..., None]


@pytest.mark.parametrize("activation", ["", "gelu", "leaky_relu"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_agrees_with_torch(agrees: Agrees, normalize: bool, activation: str, residual: bool) -> None:
    agrees("reference", 7, 13, 150, 3, normalize, activation, residual, 0.2 if residual else 1.0, True)


def test_moments_of_extended_rows_add_up() -> None:
    old, new = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    both = torch.cat((old, new), 1)
    weight, bias, found = torch.randn(4, 11).double(), torch.zeros(4).double(), torch.empty(5, 4).double()
    parts = torch.stack((moments(old), moments(new)))
    fused_linear(both, weight, bias, found, parts, weight.sum(1), 11, implementation="reference")
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(both, (11,)) @ weight.T)


def test_constant_rows_give_no_nan() -> None:
    """Their variance is zero, or slightly negative by rounding."""
    x, weight, out = torch.full((3, 8), 1e3), torch.randn(4, 8), torch.empty(3, 4)
    sums = moments(x)[None]
    sums[:, 1] *= 1 - 1e-6
    fused_linear(x, weight, torch.zeros(4), out, sums, weight.sum(1), 8, implementation="reference")
    assert out.isfinite().all()
