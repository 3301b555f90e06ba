"""Inputs for LayerNorm, dropout and ReLU that rounding does not move across the kink of ReLU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


@pytest.fixture
def inputs() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def draw(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
        x = (torch.randn(rows, width) * 2 + 1).to(dtype)
        for _ in range(50):
            before = F.layer_norm(x.double(), (width,), weight.double(), bias.double())
            near = (before.abs() < 1e-5).any(1)
            if not near.any():
                return x, weight, bias
            x[near] = (torch.randn(int(near.sum()), width) * 2 + 1).to(dtype)
        raise AssertionError("no such inputs")

    return draw
