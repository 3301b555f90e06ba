"""The compiler uses tensor cores, asynchronous copies and wide reads and writes for the fused MLP."""

from collections.abc import Callable
from typing import Any

import torch

from redline.ops.fused_mlp import fused_mlp

from ..samples import fused_mlp as sample


def test_uses_16_byte_loads_and_stores(on_card: Callable[..., Any]) -> None:
    with on_card(90, compiling=True) as launched:
        fused_mlp(**sample(torch.bfloat16))
    assert list(launched) == ["mlp_kernel"]
    ptx = launched["mlp_kernel"].asm["ptx"]
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and "st.global.v4.b32" in ptx
    assert ptx.count("ld.global.b16") <= 2  # the biases
