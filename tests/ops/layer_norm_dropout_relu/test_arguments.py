"""Tests which arguments of LayerNorm, dropout and ReLU are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu

X, WEIGHT, BIAS = torch.randn(3, 4), torch.ones(4), torch.zeros(4)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ModelError, match=r"bias must have shape \(4,\), not \(3,\)"):
        layer_norm_dropout_relu(X, WEIGHT, torch.zeros(3))
    with pytest.raises(ModelError, match=r"weight must have shape \(4,\), not \(3,\)"):
        layer_norm_dropout_relu(X, torch.ones(3), torch.zeros(3))
    with pytest.raises(ModelError, match="x must be floating-point"):
        layer_norm_dropout_relu(X.long(), WEIGHT, BIAS)
    with pytest.raises(ModelError, match="bias is on meta, but x is on cpu"):
        layer_norm_dropout_relu(X, WEIGHT, BIAS.to("meta"))
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ModelError, match="p must be at least 0 and less than 1"):
            layer_norm_dropout_relu(X, WEIGHT, BIAS, p)
    for seed in (-1, 2**63):
        with pytest.raises(ModelError, match="seed must be an integer from 0 to"):
            layer_norm_dropout_relu(X, WEIGHT, BIAS, 0.1, seed=seed)
    for seed in (torch.tensor([1, 2]), torch.tensor(1.0), torch.tensor(1, device="meta")):
        with pytest.raises(ModelError, match="one int64 element on cpu"):
            layer_norm_dropout_relu(X, WEIGHT, BIAS, 0.1, seed=seed)
