"""The compiler uses tensor cores, asynchronous copies and wide reads and writes for the fused linear layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from redline.ops.fused_linear import fused_linear

from ..samples import fused_linear as sample


@pytest.mark.parametrize("with_epilogue", [False, True])
def test_blocks_by_pointers_use_16_byte_loads_and_stores(on_card: Callable[..., Any], with_epilogue: bool) -> None:
    with on_card(90, compiling=True) as launched:
        fused_linear(**sample(torch.bfloat16, columns=64, with_epilogue=with_epilogue))
    ptx = launched["linear_kernel"].asm["ptx"]
    # Row widths are not multiples of 16. A compiler that does not know the multiple of 8 loads single elements. The
    # bias is loaded so, one element per thread.
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and ptx.count("ld.global.b16") <= 1
    assert "st.global.v4.b32" in ptx and ("ld.global.v4.b32" in ptx) == with_epilogue


@pytest.mark.parametrize("with_epilogue", [False, True])
def test_blocks_by_descriptors_use_the_tensor_memory_accelerator(
    on_card: Callable[..., Any], with_epilogue: bool
) -> None:
    with on_card(90, compiling=True) as launched:
        fused_linear(**sample(torch.bfloat16, with_epilogue=with_epilogue))
    ptx = launched["descriptor_kernel"].asm["ptx"]
    assert "wgmma" in ptx and "cp.async.bulk.tensor.2d.shared" in ptx and "cp.async.bulk.tensor.2d.global" in ptx
    assert ptx.count("ld.global.b16") <= 1 and "st.global.v4" not in ptx  # the bias; moments are single elements
