"""The kernels go through the whole compiler for a GPU that is not here."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    "name", ["bf16", pytest.param("fp16", marks=pytest.mark.slow), pytest.param("fp32", marks=pytest.mark.slow)]
)
def test_compiles_for_an_h200(name: str, compiles: Callable[..., str]) -> None:
    host = pytest.importorskip("redline.ops.slot_write.triton")
    if host.INTERPRETED:
        pytest.skip("nothing is compiled when interpreted")
    sizes = {"SIZE": 768, "BLOCK_C": 32, "BLOCK_N": 128}
    whole = {"slots": "i32", "count": "i32"}
    types = {"keys": f"*{name}", "masses": "*fp32", "tokens": f"*{name}", "cosines": "*fp32", **whole}
    compiles(host.compare_kernel, types, sizes, 90, host._WARPS)
    types = dict.fromkeys(host.write_kernel.arg_names, "*fp32") | whole
    types |= dict.fromkeys(("keys", "values", "new_keys", "new_values"), f"*{name}")
    types |= {"wanted": "*i8", "written": "*i64", "threshold": "fp32"}
    ptx = compiles(host.write_kernel, types, sizes | {"BLOCK_M": 512}, 90, host._WARPS)
    assert "bar.sync" in ptx  # what threads store the others must see
