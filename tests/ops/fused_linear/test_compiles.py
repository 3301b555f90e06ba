"""The kernel goes through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

kernel = pytest.importorskip("redline.ops.kernel")
host = pytest.importorskip("redline.ops.fused_linear.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

Compiles = Callable[..., str]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compile_described(compiles: Compiles, dtype: torch.dtype, with_moments: bool) -> str:
    tiles, name = host.DESCRIBED, NAMES[dtype][1:]
    constants = host.constants(tiles, not with_moments, "gelu", with_moments, with_moments)
    wide, deep = (f"tensordesc<{name}[{tiles.rows}, {size}]>" for size in (tiles.columns, tiles.channels))
    types = {"x": deep, "weight": f"tensordesc<{name}[{tiles.columns}, {tiles.channels}]>"}
    types |= dict.fromkeys(("residual", "out"), wide)
    return through_the_compiler(compiles, host.described_kernel, constants, 90, dtype, types)


def compile_kernel(compiles: Compiles, capability: int, dtype: torch.dtype, columns: int, with_moments: bool) -> str:
    tiles = host.TILES[dtype.itemsize, host.kind(columns, with_moments)]
    constants = host.constants(tiles, not with_moments, "gelu", with_moments, with_moments)
    constants["PRECISION"] = kernel.dot_precision(dtype)
    return through_the_compiler(compiles, host.linear_kernel, constants, capability, dtype, {})


def through_the_compiler(
    compiles: Compiles,
    kernel: Any,
    constants: dict[str, Any],
    capability: int,
    dtype: torch.dtype,
    described: dict[str, str],
) -> str:
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "bias", "residual", "out"), NAMES[dtype])
    types |= dict.fromkeys(("weight_sums", "moments", "new_moments"), "*fp32")
    types |= dict.fromkeys(("channels", "eps", "share"), "fp32")
    types |= described
    return compiles(kernel, types, constants, capability, **options)


@pytest.mark.parametrize("with_moments", [False, True])
def test_compiles_for_an_h200(compiles: Compiles, with_moments: bool) -> None:
    ptx = compile_kernel(compiles, 90, torch.bfloat16, 576, with_moments)
    # Rows are no multiple of 16 numbers, and a compiler that is not told of the 8 reads them one by one; so is the bias
    # read, one number a thread.
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and ptx.count("ld.global.b16") <= 1
    assert "st.global.v4.b32" in ptx and ("ld.global.v4.b32" in ptx) == with_moments


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_moments", [False, True])
def test_compiles_by_descriptors(compiles: Compiles, dtype: torch.dtype, with_moments: bool) -> None:
    ptx = compile_described(compiles, dtype, with_moments)
    assert "wgmma" in ptx and "cp.async.bulk.tensor.2d.shared" in ptx and "cp.async.bulk.tensor.2d.global" in ptx
    assert ptx.count("ld.global.b16") <= 1 and "st.global.v4" not in ptx  # the bias; moments are single numbers


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("columns", [32, 312])
def test_compiles_for_every_card(compiles: Compiles, capability: int, dtype: torch.dtype, columns: int) -> None:
    for with_moments in (False, True):
        compile_kernel(compiles, capability, dtype, columns, with_moments)
