"""The Triton kernels go through the whole compiler, ptxas included, for a GPU that is not here."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from redline.ops.small_matmul.tiles import BLOCK_TILES, VECTOR_TILES, Tiles

host = pytest.importorskip("redline.ops.small_matmul.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

NAMES = {2: "bf16", 4: "fp32", 1: "i8"}
WHOLE = ("rows", "columns", "depth", "x_stride", "w_stride", "share", "x_scale_stride")
ENDS = {"HAS_X_SCALE": True, "HAS_W_SCALE": True, "HAS_BIAS": True}


def types(x: str, w: str) -> dict[str, str]:
    sums, ends = "*i32" if x == "i8" else "*fp32", {"bias": "*fp32", "out": "*bf16"}
    scales = {"x_scale": "*fp32", "w_scale": "*fp32", "partial": sums}
    return {"x": f"*{x}", "w": f"*{w}"} | scales | ends | dict.fromkeys(WHOLE, "i32")


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_one_row_compiles_for_an_h200(compiles: Callable[..., None], size: int) -> None:
    tiles = VECTOR_TILES[size]
    constants = ENDS | {"IS_SHARED": size == 4, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth}
    kinds = types(NAMES[max(2, size)], NAMES[size])
    compiles(host.vector_kernel, kinds, constants, num_warps=tiles.warps, num_stages=tiles.stages)


# Of a depth that does not keep the compiler busy for long.
FEW = [(*sizes, replace(choices[16], depth=64)) for sizes, choices in BLOCK_TILES.items()]
ALL = [(*sizes, one) for sizes, choices in BLOCK_TILES.items() for one in choices.values()]


@pytest.mark.parametrize(
    ("x_bytes", "w_bytes", "tiles"), FEW + [pytest.param(*case, marks=pytest.mark.slow) for case in ALL], ids=str
)
def test_more_rows_compile_for_an_h200(compiles: Callable[..., None], x_bytes: int, w_bytes: int, tiles: Tiles) -> None:
    constants = ENDS | {"IS_SHARED": w_bytes == 4, "IS_INTEGER": x_bytes == 1}
    constants |= {"PRECISION": "tf32x3" if x_bytes == 4 else "ieee"}
    constants |= {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth}
    kinds = types(NAMES[x_bytes], NAMES[w_bytes])
    compiles(host.block_kernel, kinds, constants, num_warps=tiles.warps, num_stages=tiles.stages)


@pytest.mark.parametrize("x", ["bf16", "i8"])
def test_the_sum_of_shares_compiles_for_an_h200(compiles: Callable[..., None], x: str) -> None:
    compiles(host.finish_kernel, types(x, x), ENDS | {"SHARES": 4, "BLOCK": host._FINISH_BLOCK}, num_warps=2)
