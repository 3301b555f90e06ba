"""The Triton kernel goes through the whole compiler, ptxas included, for a GPU that is not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.linear_cross_entropy.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


@pytest.mark.parametrize(("source", "out"), [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_compiles_for_an_h200(compiles: Callable[..., None], source: str, out: str) -> None:
    types = {"source": f"*{source}", "factor": "*fp32", "out": f"*{out}", "count": "i32"}
    compiles(host.scale_kernel, types, {"BLOCK": host._SCALE_BLOCK})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scaling_in_place_compiles_for_an_h200(compiles: Callable[..., None], dtype: str) -> None:
    types = {"values": f"*{dtype}", "factor": "*fp32", "count": "i32"}
    compiles(host.scale_in_place_kernel, types, {"BLOCK": host._SCALE_BLOCK})
