"""Which implementation of SwiGLU runs, and what is refused."""

import pytest
import torch

from redline.errors import MachineError, ModelError
from redline.ops import dispatch
from redline.ops.swiglu import packed_swiglu, reference, swiglu


def test_a_cpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(reference, "swiglu", lambda *_: called.append("reference"))
    swiglu(torch.randn(3), torch.randn(3))
    swiglu(torch.randn(3), torch.randn(3), "reference")
    packed_swiglu(torch.randn(6))
    packed_swiglu(torch.randn(6), "reference")
    assert called == ["reference"] * 4


def test_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    with pytest.raises(MachineError, match="SwiGLU by Triton cannot run: it is not installed: pip install triton"):
        swiglu(torch.randn(3), torch.randn(3), "triton")
    with pytest.raises(MachineError, match="SwiGLU by Triton cannot run"):
        packed_swiglu(torch.randn(6), "triton")


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
