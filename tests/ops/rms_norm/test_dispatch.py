"""Which implementation of RMSNorm runs, and what is refused."""

import pytest
import torch

from redline.errors import MachineError, ModelError
from redline.ops import dispatch
from redline.ops.rms_norm import add_rms_norm, reference, rms_norm


def test_a_cpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(reference, "rms_norm", lambda *_: called.append("rms_norm"))
    monkeypatch.setattr(reference, "add_rms_norm", lambda *_: called.append("add_rms_norm"))
    x, weight = torch.randn(3, 4), torch.ones(4)
    rms_norm(x, weight)
    add_rms_norm(x, x, weight, implementation="reference")
    assert called == ["rms_norm", "add_rms_norm"]


def test_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    with pytest.raises(MachineError, match="RMSNorm by Triton cannot run: it is not installed: pip install triton"):
        rms_norm(x, weight, implementation="triton")
    with pytest.raises(MachineError, match="pip install triton"):
        add_rms_norm(x, x, weight, implementation="triton")
    with pytest.raises(ModelError, match="no implementation 'cuda': it has auto, reference, triton"):
        rms_norm(x, weight, implementation="cuda")


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    with pytest.raises(ModelError, match=r"not \(3, 4\) and \(3,\)"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(ModelError, match=r"not \(3, 4\) and \(4, 1\)"):
        rms_norm(x, torch.ones(4, 1))
    with pytest.raises(ModelError, match="weight is on meta, but its input is on cpu"):
        rms_norm(x, weight.to("meta"))
    with pytest.raises(ModelError, match="floating-point numbers, not torch.int64"):
        rms_norm(x.long(), weight)
    with pytest.raises(ModelError, match=r"\(3, 4\) in float32 on cpu and \(1, 4\) in float32 on cpu"):
        add_rms_norm(x, x[:1], weight)
    with pytest.raises(ModelError, match="the same shape, dtype and device"):
        add_rms_norm(x, x.double(), weight)
