"""Arguments of RMSNorm that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.rms_norm import add_rms_norm, rms_norm


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
