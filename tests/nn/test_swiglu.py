"""Tests the gated MLP against its formula, and that gate and up stay in one tensor."""

import pytest
import torch
from torch.nn import functional as F

from redline.nn import swiglu
from redline.nn.swiglu import SwiGLU


def test_agrees_with_its_formula() -> None:
    mlp, x = SwiGLU(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up = mlp.gate_up.weight[:10], mlp.gate_up.weight[10:]
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.t()) * (x @ up.t())) @ mlp.down.weight.t())


def test_gate_and_up_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, str]] = []

    def packed(gate_up: torch.Tensor, implementation: str) -> torch.Tensor:
        asked.append((gate_up.shape, implementation))
        return gate_up[..., :10]

    monkeypatch.setattr(swiglu, "packed_swiglu", packed)
    mlp = SwiGLU(6, 10)
    mlp.implementation = "auto"
    mlp(torch.randn(2, 3, 6))
    assert asked == [((2, 3, 20), "auto")]
