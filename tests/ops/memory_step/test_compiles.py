"""The kernel goes through the whole compiler for a GPU that is not here, and through torch's."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    "name", ["bf16", pytest.param("fp16", marks=pytest.mark.slow), pytest.param("fp32", marks=pytest.mark.slow)]
)
def test_compiles_for_an_h200(name: str, compiles: Callable[..., str]) -> None:
    host = pytest.importorskip("redline.ops.memory_step.triton")
    if host.INTERPRETED:
        pytest.skip("nothing is compiled when interpreted")
    sizes = {"TAPS": 4, "KEYS": 64, "VALUES": 64, "BLOCK_K": 64, "BLOCK_V": 64}
    types = dict.fromkeys(host.step_kernel.arg_names, f"*{name}")
    types |= {"state": "*fp32", "new_state": "*fp32", "heads": "i32", "eps": "fp32"}
    compiles(host.step_kernel, types, sizes, 90, 4)
