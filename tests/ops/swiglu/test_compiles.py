"""SwiGLU's kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.swiglu.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")
NUMBERS = ("width", "gate_stride", "up_stride", "blocks", "pull_stride")


def compile_kernels(compiles: Callable[..., None], name: str, number: str = "i32", capability: int = 90) -> None:
    for kernel, tiles in ((host.forward_kernel, "forward"), (host.backward_kernel, "backward")):
        chosen = host.TILES[tiles]
        types = dict.fromkeys(kernel.arg_names, f"*{name}") | dict.fromkeys(NUMBERS, number)
        compiles(kernel, types, {"BLOCK": chosen.block}, capability, chosen.warps)


def test_compiles_for_an_h200(compiles: Callable[..., None]) -> None:
    compile_kernels(compiles, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("number", ["i32", "i64"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_compiles_for_every_dtype(compiles: Callable[..., None], name: str, number: str, capability: int) -> None:
    compile_kernels(compiles, name, number, capability)
