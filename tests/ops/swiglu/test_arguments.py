"""Tests which arguments of SwiGLU are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.swiglu import packed_swiglu, swiglu


def test_invalid_arguments_are_refused() -> None:
    gate = torch.randn(3, 4)
    with pytest.raises(ModelError, match=r"up must have shape \(3, 4\), not \(3, 5\)"):
        swiglu(gate, torch.randn(3, 5))
    with pytest.raises(ModelError, match="up is torch.float16, but gate is torch.float32"):
        swiglu(gate, gate.half())
    with pytest.raises(ModelError, match="up is on meta, but gate is on cpu"):
        swiglu(gate, gate.to("meta"))
    with pytest.raises(ModelError, match="gate must be floating-point, not torch.int64"):
        swiglu(gate.long(), gate.long())
    with pytest.raises(ModelError, match=r"last dimension of gate_up must be even, not \(4, 3\)"):
        packed_swiglu(gate.t())
    with pytest.raises(ModelError, match="gate_up must be floating-point, not torch.int64"):
        packed_swiglu(gate.long())
