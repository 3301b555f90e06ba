"""Tests which arguments of the fused linear layer are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.fused_linear import fused_linear

X, WEIGHT, BIAS, OUT = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5), torch.zeros(3, 5)
MOMENTS, SUMS = torch.zeros(1, 2, 3), torch.zeros(5)


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ((X[0], WEIGHT, BIAS, OUT), {}, r"x_MK must have shape \(M, K\), not \(8,\)"),
        ((X[:, :7], WEIGHT, BIAS, OUT), {}, r"weight_NK must have shape \(N, 7\), not \(5, 8\)"),
        ((X, WEIGHT, BIAS[:4], OUT), {}, r"bias_N must have shape \(5,\), not \(4,\)"),
        ((X, WEIGHT, BIAS, OUT[:2]), {}, r"out_MN must have shape \(3, 5\), not \(2, 5\)"),
        (
            (X, WEIGHT, BIAS, OUT),
            {"residual_MN": OUT.double()},
            "residual_MN is torch.float64, but x_MK is torch.float32",
        ),
        ((X, WEIGHT, BIAS, OUT), {"activation": "relu"}, "unknown activation 'relu' .supported: gelu, leaky_relu"),
        ((X, WEIGHT, BIAS, OUT), {"moments_P2M": MOMENTS[0]}, r"moments_P2M must have shape \(P, 2, 3\), not \(2, 3\)"),
        ((X, WEIGHT, BIAS, OUT), {"moments_P2M": MOMENTS}, "needs weight_sums_N, the sums of the weight's rows"),
        (
            (X, WEIGHT, BIAS, OUT),
            {"moments_P2M": MOMENTS, "weight_sums_N": SUMS},
            "channels must be from 1 to 8, not 0",
        ),
        (
            (X, WEIGHT, BIAS, OUT),
            {"new_moments_P2M": MOMENTS[:, :1]},
            r"new_moments_P2M must have shape \(1, 2, 3\), not \(1, 1, 3\)",
        ),
        ((X.clone().requires_grad_(), WEIGHT, BIAS, OUT), {}, "x_MK requires grad, but the op has no gradient"),
    ],
)
def test_invalid_arguments_are_refused(
    given: tuple[torch.Tensor, ...], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        fused_linear(*given, **options)
