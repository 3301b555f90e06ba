"""The Triton kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest
import torch

host = pytest.importorskip("redline.ops.window_attention.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

Compiles = Callable[..., None]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALWAYS_FP32 = ("lse", "delta", "partial")
WHOLE_NUMBERS = ("height", "width", "windows", "shares")
KERNELS = [
    (host.forward_kernel, host.FORWARD_TILES),
    (host.query_gradient_kernel, host.BACKWARD_TILES),
    (host.key_gradient_kernel, host.BACKWARD_TILES),
    (host.bias_gradient_kernel, host.BACKWARD_TILES),
]


def compile_kernels(
    compiles: Compiles, capability: int, dtype: torch.dtype, size: int, heads: int, window: int = 16, kernels: int = 4
) -> None:
    qkv = torch.empty(1, window, window, 3 * size * heads, dtype=dtype, device="meta")
    table = torch.empty((2 * window - 1) ** 2, heads, dtype=dtype, device="meta")
    for kernel, tiles in KERNELS[:kernels]:
        block, rest = host._pieces(size) if kernel is host.forward_kernel else (0, 0)
        constants, _ = host._constants(qkv, table, heads, window, window // 2, tiles, block)
        if kernel is host.forward_kernel:
            constants |= {"REST": rest, "WRITES_LSE": True}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        del constants["scale"]
        types = dict.fromkeys(kernel.arg_names, NAMES[dtype]) | dict.fromkeys(ALWAYS_FP32, "*fp32")
        types |= dict.fromkeys(WHOLE_NUMBERS, "i32") | {"scale": "fp32"}
        compiles(kernel, types, constants, capability, **options)


def test_forward_compiles_for_an_h200(compiles: Compiles) -> None:
    compile_kernels(compiles, 90, torch.bfloat16, size=30, heads=6, kernels=1)
    compile_kernels(compiles, 90, torch.bfloat16, size=80, heads=4, kernels=1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("size", "heads"), [(30, 6), (53, 4), (122, 2), (46, 6), (77, 4), (16, 1), (48, 6), (80, 4), (96, 2)]
)
def test_compiles_for_every_size(
    compiles: Compiles, capability: int, dtype: torch.dtype, size: int, heads: int
) -> None:
    compile_kernels(compiles, capability, dtype, size, heads)


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 8, 32])
@pytest.mark.parametrize("dtype", NAMES)
def test_compiles_for_other_windows(compiles: Compiles, window: int, dtype: torch.dtype) -> None:
    compile_kernels(compiles, 90, dtype, size=46, heads=2, window=window)
