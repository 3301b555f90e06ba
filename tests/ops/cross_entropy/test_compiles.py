"""The Triton kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.cross_entropy.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

COMMON = {"row_stride": "i32", "classes": "i32", "ignore_index": "i32", "smoothing": "fp32", "z_loss": "fp32"}


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4), pytest.param("fp16", 2, marks=pytest.mark.slow)])
def test_compiles_for_an_h200(compiles: Callable[..., None], dtype: str, size: int) -> None:
    forward, backward = host.FORWARD_TILES[size], host.GRADIENT_TILES[size]
    types = COMMON | {"logits": f"*{dtype}", "target": "*i64", "loss": "*fp32", "lse": "*fp32"}
    compiles(host.forward_kernel, types, {"SMOOTH": True, "BLOCK": forward.classes}, num_warps=forward.warps)
    types |= {"pull": "*fp32", "gradient": f"*{dtype}", "gradient_stride": "i32"}
    compiles(host.gradient_kernel, types, {"BLOCK": backward.classes}, num_warps=backward.warps)
    both = host.BOTH_TILES[size]
    compiles(host.both_kernel, types, {"SMOOTH": True, "BLOCK": both.classes}, num_warps=both.warps)
