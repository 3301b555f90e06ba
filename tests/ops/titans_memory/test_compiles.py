"""The Triton kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

host = pytest.importorskip("redline.ops.titans_memory.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")
Compiles = Callable[..., None]

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# What has the inputs' dtype; all else is fp32.
ROUNDED = {"q", "k", "v", "errors", "out", "out_pull", "local_pull", "v_pull", "q_pull", "k_pull"}
ROUNDED |= {"memories", "momenta", "anchors", "memory_pulls", "momentum_pulls"}
FORWARD = [host.forward.gate_kernel, host.forward.state_kernel, host.forward.output_kernel]
BACKWARD = [getattr(host.backward, name) for name in vars(host.backward) if name.endswith("_pull_kernel")]


def compile_one(
    compiles: Compiles, kernel: Any, dtype: torch.dtype, keys: int, values: int, chunk: int = 64, cut: bool = True
) -> None:
    q, v = (torch.empty(1, 128, 2, size, dtype=dtype, device="meta") for size in (keys, values))
    start = host.Launch(q, v, q if cut else None, chunk)
    types = {name: "*" + NAMES[dtype] if name in ROUNDED else "*fp32" for name in kernel.arg_names}
    types |= {"tokens": "i32", "heads": "i32", "wrap": "*i32", "fresh": "*i32"}
    constants = start.constants(kernel)
    if not cut:
        constants |= dict.fromkeys(("wrap", "fresh", "memory", "momentum", "anchor"))
    compiles(
        kernel,
        types,
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        **start.options(kernel),
    )


@pytest.mark.parametrize("kernel", [host.forward.state_kernel, host.backward.gate_pull_kernel])
def test_compiles_for_an_h200(compiles: Compiles, kernel: Any) -> None:
    compile_one(compiles, kernel, torch.bfloat16, 64, 64)


def test_tiles_are_fine_where_most_of_a_device_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.kernel, "_INTERPRETED_PROCESSORS", 132)

    def values(batch: int, size: int = 64) -> int:
        q = torch.empty(batch, 128, 12, size, dtype=torch.bfloat16, device="meta")
        return host.Launch(q, q, None, 64).tiles.values

    assert [values(1), values(2), values(4)] == [16, 16, 32]
    assert [values(1, 128), values(22, 128)] == [16, 16]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*FORWARD, *BACKWARD], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (96, 32)])
def test_compiles_for_every_size(compiles: Compiles, kernel: Any, dtype: torch.dtype, keys: int, values: int) -> None:
    compile_one(compiles, kernel, dtype, keys, values)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*FORWARD, *BACKWARD], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_compiles_for_every_chunk_without_cuts(compiles: Compiles, kernel: Any, chunk: int) -> None:
    compile_one(compiles, kernel, torch.bfloat16, 64, 64, chunk, cut=False)
