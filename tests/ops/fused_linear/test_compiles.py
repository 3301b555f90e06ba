"""The kernel goes through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

host = pytest.importorskip("redline.ops.fused_linear.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

Compiles = Callable[..., str]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compile_rows(compiles: Compiles, channels: int, dtype: torch.dtype, with_moments: bool) -> str:
    constants = host.kept_constants(channels, not with_moments, "gelu", with_moments, with_moments)
    return through_the_compiler(compiles, host.rows_kernel, constants, 90, dtype)


def compile_kernel(compiles: Compiles, capability: int, dtype: torch.dtype, columns: int, with_moments: bool) -> str:
    tiles = host.TILES[dtype.itemsize, host.kind(columns, with_moments)]
    constants = host.constants(dtype, tiles, not with_moments, "gelu", with_moments, with_moments)
    return through_the_compiler(compiles, host.linear_kernel, constants, capability, dtype)


def through_the_compiler(
    compiles: Compiles, kernel: Any, constants: dict[str, Any], capability: int, dtype: torch.dtype
) -> str:
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "bias", "residual", "out"), NAMES[dtype])
    types |= dict.fromkeys(("weight_sums", "moments", "new_moments"), "*fp32")
    types |= dict.fromkeys(("channels", "eps", "share"), "fp32")
    return compiles(kernel, types, constants, capability, **options)


@pytest.mark.parametrize("with_moments", [False, True])
def test_compiles_for_an_h200(compiles: Compiles, with_moments: bool) -> None:
    ptx = compile_kernel(compiles, 90, torch.bfloat16, 576, with_moments)
    # Rows are no multiple of 16 numbers, and a compiler that is not told of the 8 reads them one by one; so is the bias
    # read, one number a thread.
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and ptx.count("ld.global.b16") <= 1
    assert "st.global.v4.b32" in ptx and ("ld.global.v4.b32" in ptx) == with_moments


@pytest.mark.parametrize(("channels", "with_moments"), [(184, False), (312, True)])
def test_kept_rows_compile_for_an_h200(compiles: Compiles, channels: int, with_moments: bool) -> None:
    ptx = compile_rows(compiles, channels, torch.bfloat16, with_moments)
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and "st.global.v4.b32" in ptx
    assert ptx.count("ld.global.b16") <= 1  # the bias


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [8, 216, 248, 280])
def test_kept_rows_compile_for_all_widths(compiles: Compiles, channels: int, dtype: torch.dtype) -> None:
    for with_moments in (False, True):
        compile_rows(compiles, channels, dtype, with_moments)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("columns", [32, 312])
def test_compiles_for_every_card(compiles: Compiles, capability: int, dtype: torch.dtype, columns: int) -> None:
    for with_moments in (False, True):
        compile_kernel(compiles, capability, dtype, columns, with_moments)
