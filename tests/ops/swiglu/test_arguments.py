"""Arguments of SwiGLU that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.swiglu import packed_swiglu, swiglu


def test_what_does_not_fit_is_refused() -> None:
    gate = torch.randn(3, 4)
    with pytest.raises(ModelError, match=r"not \(3, 4\) in float32 on cpu and \(3, 5\) in float32 on cpu"):
        swiglu(gate, torch.randn(3, 5))
    with pytest.raises(ModelError, match="same shape, dtype and device"):
        swiglu(gate, gate.half())
    with pytest.raises(ModelError, match="same shape, dtype and device"):
        swiglu(gate, gate.to("meta"))
    with pytest.raises(ModelError, match="floating-point numbers, not torch.int64"):
        swiglu(gate.long(), gate.long())
    with pytest.raises(ModelError, match=r"takes gate and up side by side, not \(4, 3\)"):
        packed_swiglu(gate.t())
    with pytest.raises(ModelError, match="floating-point numbers, not torch.int64"):
        packed_swiglu(gate.long())
