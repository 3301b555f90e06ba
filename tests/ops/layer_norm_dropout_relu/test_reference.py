"""Tests the reference of LayerNorm, dropout and ReLU against torch, and Philox against published values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu
from redline.ops.layer_norm_dropout_relu.reference import keep_mask, philox

Inputs = Callable[..., tuple[Tensor, Tensor, Tensor]]


def test_without_dropout_agrees_with_torch() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 5, 37), (37,), (37,)))
    expected = F.layer_norm(x, (37,), weight, bias, 1e-3).relu()
    torch.testing.assert_close(layer_norm_dropout_relu(x, weight, bias, eps=1e-3), expected)
    torch.testing.assert_close(layer_norm_dropout_relu(x, weight, bias, 0.9, 1e-3, training=False), expected)


def test_philox_agrees_with_published_values() -> None:
    # The known answers of Random123 for counters of two words.
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in philox(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_dropout_scales_kept_elements_and_zeroes_the_rest() -> None:
    x, weight, bias = torch.randn(4000, 101), torch.zeros(101), torch.ones(101)
    for p in (0.1, 0.5, 0.9):
        out = layer_norm_dropout_relu(x, weight, bias, p, seed=7)
        kept = out > 0
        assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / out.numel()) ** 0.5
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


def test_masks_differ_by_row_column_and_seed() -> None:
    mask = keep_mask(torch.tensor(2**62 + 3), 200, 203, 0.5).double() * 2 - 1
    other = keep_mask(torch.tensor(2**62 + 4), 200, 203, 0.5).double() * 2 - 1
    high = keep_mask(torch.tensor(2**61 + 3), 200, 203, 0.5).double() * 2 - 1
    for one, two in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask, other), (mask, high)):
        assert (one * two).mean().abs() < 0.03
    assert torch.equal(mask, keep_mask(torch.tensor(2**62 + 3), 200, 203, 0.5).double() * 2 - 1)
    assert torch.equal(mask[:50, :100], keep_mask(torch.tensor(2**62 + 3), 50, 100, 0.5).double() * 2 - 1)


def test_the_seed_may_be_an_int_a_tensor_or_drawn() -> None:
    x, weight, bias = torch.randn(9, 30), torch.zeros(30), torch.ones(30)
    by_number = layer_norm_dropout_relu(x, weight, bias, 0.5, seed=11)
    assert torch.equal(by_number, layer_norm_dropout_relu(x, weight, bias, 0.5, seed=torch.tensor([11])))
    torch.manual_seed(3)
    first, second = (layer_norm_dropout_relu(x, weight, bias, 0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, layer_norm_dropout_relu(x, weight, bias, 0.5))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(inputs: Inputs, dtype: torch.dtype) -> None:
    given = inputs(20, 64, dtype)
    exact = layer_norm_dropout_relu(*(tensor.double() for tensor in given), 0.2, seed=5)
    found = layer_norm_dropout_relu(*given, 0.2, seed=5)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients(inputs: Inputs, p: float) -> None:
    given = [tensor.double().requires_grad_() for tensor in inputs(3, 7)]
    assert torch.autograd.gradcheck(lambda *tensors: layer_norm_dropout_relu(*tensors, p, seed=5), given)
