"""The kernels of LayerNorm, dropout and ReLU go through the whole compiler, for GPUs that are not here."""

from collections.abc import Callable

import pytest

host = pytest.importorskip("redline.ops.layer_norm_dropout_relu.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")


def compile_kernels(compiles: Callable[..., None], width: int, name: str, p: float, capability: int = 90) -> None:
    types = dict.fromkeys((*host.forward_kernel.arg_names, *host.backward_kernel.arg_names), f"*{name}")
    types |= {"seed": "*i64", "partial": "*fp32", "rows": "i32", "threshold": "i32", "eps": "fp32", "scale": "fp32"}
    for kernel, choices in ((host.forward_kernel, host.FORWARD_TILES), (host.backward_kernel, host.BACKWARD_TILES)):
        constants, tiles = host._constants(choices, width, p)
        warps = constants.pop("num_warps")
        compiles(kernel, types, constants | {"STAGES": tiles.stages}, capability, warps)


@pytest.mark.parametrize(("width", "p"), [(768, 0.1), (4096, 0.0)])
def test_compiles_for_an_h200(compiles: Callable[..., None], width: int, p: float) -> None:
    compile_kernels(compiles, width, "bf16", p)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [1, 37, 64, 128, 200, 512, 2048, 5000, 8192, 65536])
def test_compiles_for_every_size(compiles: Callable[..., None], width: int, name: str, capability: int) -> None:
    compile_kernels(compiles, width, name, 0.1, capability)
