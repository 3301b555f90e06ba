"""Tests the reference of SwiGLU against its formula."""

import pytest
import torch

from redline.ops.swiglu import packed_swiglu, swiglu


def test_agrees_with_its_formula() -> None:
    gate, up = torch.randn(3, 5, 7, dtype=torch.float64) * 4, torch.randn(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_a_packed_tensor_has_the_gate_first() -> None:
    gate, up = torch.randn(3, 5, 7, dtype=torch.float64) * 4, torch.randn(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(packed_swiglu(torch.cat((gate, up), -1)), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    gate, up = torch.randn(50, 64).to(dtype), torch.randn(50, 64).to(dtype)
    exact, found = swiglu(gate.double(), up.double()), swiglu(gate, up)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


def test_large_gates_stay_finite() -> None:
    gate = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    torch.testing.assert_close(swiglu(gate, torch.ones(4)), torch.tensor([0.0, 0.0, 100.0, 1e4]))


def test_gradients() -> None:
    halves = torch.randn(3, 14, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: swiglu(*x.chunk(2, -1)), (halves,))
    assert torch.autograd.gradcheck(packed_swiglu, (halves,))
