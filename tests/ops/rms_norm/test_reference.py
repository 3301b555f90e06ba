"""Tests the reference of RMSNorm against torch and against Llama's code."""

import pytest
import torch
from torch.nn import functional as F

from redline.ops.rms_norm import add_rms_norm, rms_norm


def test_agrees_with_torch() -> None:
    x, weight = torch.randn(3, 5, 37, dtype=torch.float64) * 3, torch.randn(37, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (37,), weight, 1e-3))


def test_agrees_with_llama() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(96, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 7, 96) * 10
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x), atol=1e-6, rtol=1e-6)


def test_a_row_of_zeros_stays_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 5), torch.ones(5)), torch.zeros(2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(50, 64).to(dtype), torch.randn(64).to(dtype)
    exact = rms_norm(x.double(), weight.double())
    found = rms_norm(x, weight)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


def test_returns_the_sum_with_the_residual() -> None:
    x, residual, weight = torch.randn(6, 33).bfloat16(), torch.randn(6, 33).bfloat16(), torch.randn(33)
    normed, total = add_rms_norm(x, residual, weight)
    assert normed.dtype == total.dtype == torch.bfloat16
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight))


def test_gradients() -> None:
    x, residual = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(add_rms_norm, (x, residual, weight))
