"""Tests the reference against torch modules, and which arguments are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redline.errors import ModelError
from redline.ops.fused_mlp import fused_mlp

Agrees = Callable[..., None]


@pytest.mark.parametrize(("rows", "channels", "hidden", "columns"), [(1, 8, 3, 9), (5, 20, 40, 6), (9, 180, 360, 136)])
@pytest.mark.parametrize(("activation", "residual", "share"), [("", True, 0.2), ("leaky_relu", False, 1.0)])
def test_agrees(
    agrees: Agrees, rows: int, channels: int, hidden: int, columns: int, activation: str, residual: bool, share: float
) -> None:
    agrees("reference", rows, channels, hidden, columns, 4, activation, residual, share)


def given(**changes: Any) -> dict[str, Any]:
    """Returns arguments with 3 rows, 8 input channels, 16 hidden channels and 5 output columns."""
    whole: dict[str, Any] = {
        "x_MK": torch.zeros(3, 8),
        "inner_HK": torch.zeros(16, 8),
        "inner_bias_H": torch.zeros(16),
        "outer_NJ": torch.zeros(5, 24),
        "outer_bias_N": torch.zeros(5),
        "out_MN": torch.zeros(3, 5),
        "moments_P2M": torch.zeros(1, 2, 3),
        "inner_sums_H": torch.zeros(16),
        "channels": 8,
    }
    return whole | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x_MK": torch.zeros(8)}, r"x_MK must have shape \(M, K\), not \(8,\)"),
        ({"inner_HK": torch.zeros(16, 7)}, r"inner_HK must have shape \(H, 8\), not \(16, 7\)"),
        ({"outer_NJ": torch.zeros(5, 16)}, r"outer_NJ must have shape \(5, 24\), not \(5, 16\)"),
        ({"inner_bias_H": torch.zeros(5)}, r"inner_bias_H must have shape \(16,\), not \(5,\)"),
        ({"outer_bias_N": torch.zeros(16)}, r"outer_bias_N must have shape \(5,\), not \(16,\)"),
        ({"out_MN": torch.zeros(2, 5)}, r"out_MN must have shape \(3, 5\), not \(2, 5\)"),
        ({"residual_MN": torch.zeros(3, 5).double()}, "residual_MN is torch.float64, but x_MK is torch.float32"),
        ({"activation": "relu"}, "unknown activation 'relu' .supported: gelu, leaky_relu"),
        ({"moments_P2M": torch.zeros(2, 3)}, r"moments_P2M must have shape \(P, 2, 3\), not \(2, 3\)"),
        ({"inner_sums_H": torch.zeros(5)}, r"inner_sums_H must have shape \(16,\), not \(5,\)"),
        ({"channels": 0}, "channels must be from 1 to 8, not 0"),
        ({"new_moments_P2M": torch.zeros(1, 1, 3)}, r"new_moments_P2M must have shape \(1, 2, 3\), not \(1, 1, 3\)"),
        ({"outer_NJ": torch.zeros(5, 24, requires_grad=True)}, "weight_1 requires grad, but the op has no gradient"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        fused_mlp(**given(**changes))
