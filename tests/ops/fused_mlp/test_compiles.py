"""The kernel goes through the whole compiler, ptxas included, for a GPU that is not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.fused_mlp.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


@pytest.mark.parametrize(
    ("channels", "columns"),
    [
        (184, 32),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((248, 32), (280, 32), (312, 32), (312, 184))),
    ],
)
def test_compiles_for_an_h200(compiles: Callable[..., str], channels: int, columns: int) -> None:
    constants = host.constants(channels, columns, "leaky_relu", columns > 32, True)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(host.mlp_kernel.arg_names, "i32")
    half = ("x", "inner", "inner_bias", "outer", "outer_bias", "residual", "out")
    types |= dict.fromkeys(half, "*bf16") | dict.fromkeys(("inner_sums", "moments", "new_moments"), "*fp32")
    types |= dict.fromkeys(("channels", "eps", "share"), "fp32")
    ptx = compiles(host.mlp_kernel, types, constants, 90, **options)
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx and "st.global.v4.b32" in ptx
    assert ptx.count("ld.global.b16") <= 2  # the biases
