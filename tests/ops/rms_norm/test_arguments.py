"""Tests which arguments of RMSNorm are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.rms_norm import add_rms_norm, rms_norm


def test_invalid_arguments_are_refused() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    with pytest.raises(ModelError, match=r"weight must have shape \(4,\), not \(3,\)"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(ModelError, match=r"weight must have shape \(4,\), not \(4, 1\)"):
        rms_norm(x, torch.ones(4, 1))
    with pytest.raises(ModelError, match="weight is on meta, but x is on cpu"):
        rms_norm(x, weight.to("meta"))
    with pytest.raises(ModelError, match="x must be floating-point, not torch.int64"):
        rms_norm(x.long(), weight)
    with pytest.raises(ModelError, match=r"residual must have shape \(3, 4\), not \(1, 4\)"):
        add_rms_norm(x, x[:1], weight)
    with pytest.raises(ModelError, match="residual is torch.float64, but x is torch.float32"):
        add_rms_norm(x, x.double(), weight)
