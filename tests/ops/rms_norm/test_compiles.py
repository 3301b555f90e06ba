"""RMSNorm's kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.rms_norm.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


def compile_kernels(compiles: Callable[..., None], width: int, name: str, add: bool, capability: int = 90) -> None:
    types = dict.fromkeys((*host.forward_kernel.arg_names, *host.backward_kernel.arg_names), f"*{name}")
    types |= {"partial": "*fp32", "rows": "i32", "eps": "fp32"}
    block = host.kernel.padded(width)
    tiles = host._chosen(host.FORWARD_TILES, block)
    constants = {"WIDTH": width, "BLOCK": block, "ADD": add}
    absent = {} if add else {"residual": None, "total": None, "total_pull": None}
    compiles(host.forward_kernel, types, constants | absent | {"ROWS": tiles.rows}, capability, tiles.warps)
    tiles = host._chosen(host.BACKWARD_TILES, block)
    constants |= absent | {"ROWS": tiles.rows, "STAGES": tiles.stages}
    compiles(host.backward_kernel, types, constants, capability, tiles.warps)
    types = {"partial": "*fp32", "weight_pull": f"*{name}", "programs": "i32"}
    tiles = host.SUM_TILES
    constants = {"WIDTH": width, "ROWS": tiles.rows, "COLUMNS": tiles.columns}
    compiles(host.sum_kernel, types, constants, capability, tiles.warps)


@pytest.mark.parametrize(("width", "add"), [(768, True), (4096, False)])
def test_compiles_for_an_h200(compiles: Callable[..., None], width: int, add: bool) -> None:
    compile_kernels(compiles, width, "bf16", add)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [1, 37, 64, 128, 200, 512, 2048, 5000, 8192, 16384, 65536])
def test_compiles_for_every_size(compiles: Callable[..., None], width: int, name: str, capability: int) -> None:
    compile_kernels(compiles, width, name, True, capability)
