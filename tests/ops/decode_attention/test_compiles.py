"""The kernels go through the whole compiler for a GPU that is not here."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("shares", [1, 16])
@pytest.mark.parametrize(
    "name", ["bf16", pytest.param("fp16", marks=pytest.mark.slow), pytest.param("fp32", marks=pytest.mark.slow)]
)
def test_compiles_for_an_h200(name: str, shares: int, compiles: Callable[..., None]) -> None:
    host = pytest.importorskip("redline.ops.decode_attention.triton")
    if host.INTERPRETED:
        pytest.skip("nothing is compiled when interpreted")
    kernel, tiles = host.attend_kernel, host.TILES
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("q", "k", "v", "keys", "values", "out"), f"*{name}")
    types |= dict.fromkeys(("partial", "peaks", "sums"), "*fp32" if shares > 1 else f"*{name}")
    types |= {"lengths": "*i64", "scale": "fp32"}
    sizes = {"SHARES": shares, "SHARING": 4, "DIM": 64, "BLOCK_R": 16, "BLOCK_C": tiles.places, "BLOCK_D": 64}
    compiles(kernel, types, sizes | {"PRECISION": "ieee"}, 90, tiles.warps, tiles.stages)
    if shares > 1:
        types = {"partial": "*fp32", "peaks": "*fp32", "sums": "*fp32", "out": f"*{name}"}
        sizes = {"SHARES": shares, "BLOCK_S": 16, "DIM": 64, "BLOCK_D": 64}
        compiles(host.merge_kernel, types, sizes, 90, host._MERGE_WARPS)
