"""Rope's kernel goes through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.rope.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


def compile_kernel(
    compiles: Callable[..., None], heads: tuple[int, int], channels: int, name: str, positions: str, capability: int
) -> None:
    constants = host._constants(*heads, channels // 2)
    warps = constants.pop("num_warps")
    types = dict.fromkeys(host.rope_kernel.arg_names, "i32") | {"cos": "*fp32", "sin": "*fp32", "positions": positions}
    types |= dict.fromkeys(("q", "k", "q_out", "k_out"), f"*{name}")
    for back in (False, True):
        there = {"HAS_POSITIONS": True} if positions else {"HAS_POSITIONS": False, "positions": None}
        compiles(host.rope_kernel, types, constants | there | {"BACK": back}, capability, warps)


@pytest.mark.parametrize("positions", ["", "*i64"])
def test_compiles_for_an_h200(compiles: Callable[..., None], positions: str) -> None:
    compile_kernel(compiles, (32, 8), 128, "bf16", positions, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("heads", "channels"), [((12, 12), 64), ((128, 8), 128), ((3, 1), 6), ((1, 1), 1024)])
def test_compiles_for_every_size(
    compiles: Callable[..., None], heads: tuple[int, int], channels: int, name: str, capability: int
) -> None:
    compile_kernel(compiles, heads, channels, name, "*i32", capability)
