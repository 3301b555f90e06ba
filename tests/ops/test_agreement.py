"""Tests the `agrees` fixture: rounding passes, also where large terms cancel, and errors fail."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).sum(-1)


def in_parts(a: Tensor, b: Tensor) -> Tensor:
    return a.sum(-1) - b.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cancellation_allows_the_rounding_error_of_its_terms(agrees: Callable[..., None], dtype: torch.dtype) -> None:
    a = torch.randn(3, 50)
    close = a * (1 + 1e-3 * torch.randn(3, 50))
    agrees(in_parts, difference, (a, close), dtype)


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_errors_in_outputs_and_gradients_are_detected(agrees: Callable[..., None], factor: float) -> None:
    a = torch.randn(3, 50)
    close = a * (1 + 1e-3 * torch.randn(3, 50))
    with pytest.raises(AssertionError, match="output 0 is off"):
        agrees(lambda a, b: factor * in_parts(a, b), difference, (a, close))

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, one):
            return one.sum(-1)

        @staticmethod
        def backward(ctx, grad):
            return (factor * grad)[..., None].expand(3, 50)

    with pytest.raises(AssertionError, match="gradient 1 is off"):
        agrees(lambda a, b: a.sum(-1) - WrongGradient.apply(b), difference, (a, close))
