"""The Triton kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
host = pytest.importorskip("redline.ops.window_attention.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ALWAYS_FP32 = ("lse", "delta", "partial")
WHOLE_NUMBERS = ("height", "width", "windows", "shares")
# What a program may have at least, of the cards of a compute capability.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
KERNELS = [
    (host.forward_kernel, host.FORWARD_TILES),
    (host.query_gradient_kernel, host.BACKWARD_TILES),
    (host.key_gradient_kernel, host.BACKWARD_TILES),
    (host.bias_gradient_kernel, host.BACKWARD_TILES),
]


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernels(
    capability: int, dtype: torch.dtype, size: int, heads: int, window: int = 16, kernels: int = len(KERNELS)
) -> None:
    qkv = torch.empty(1, window, window, 3 * size * heads, dtype=dtype, device="meta")
    table = torch.empty((2 * window - 1) ** 2, heads, dtype=dtype, device="meta")
    for kernel, tiles in KERNELS[:kernels]:
        constants, _ = host._constants(qkv, table, window, window // 2, tiles)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        signature, values, divisible = {}, {}, {}
        for index, name in enumerate(kernel.arg_names):
            if name.isupper():
                signature[name], values[(index,)] = "constexpr", constants[name]
            elif name == "scale":
                signature[name] = "fp32"
            else:
                pointer = "*" + ("fp32" if name in ALWAYS_FP32 else NAMES[dtype])
                signature[name] = "i32" if name in WHOLE_NUMBERS else pointer
                divisible[(index,)] = [["tt.divisibility", 16]]
        source = compiler.ASTSource(kernel, signature, values, divisible)
        target = backends.GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel.__name__
        assert compiled.asm["cubin"]


def test_forward_compiles_for_an_h200() -> None:
    compile_kernels(90, torch.bfloat16, size=30, heads=6, kernels=1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("size", "heads"), [(30, 6), (53, 4), (122, 2), (46, 6), (77, 4), (16, 1)])
def test_compiles_for_every_size(capability: int, dtype: torch.dtype, size: int, heads: int) -> None:
    compile_kernels(capability, dtype, size, heads)


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 8, 32])
@pytest.mark.parametrize("dtype", NAMES)
def test_compiles_for_other_windows(window: int, dtype: torch.dtype) -> None:
    compile_kernels(90, dtype, size=46, heads=2, window=window)
