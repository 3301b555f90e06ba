"""The Triton kernels go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

host = pytest.importorskip("redline.ops.gated_delta_rule.triton")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")
Compiles = Callable[..., None]

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP32 = {"g", "beta", "decay", "initial", "final", "final_pull", "initial_pull", "g_pull", "beta_pull"}
FP32 |= {"q_decay_pull", "k_decay_pull"}
FORWARD = [
    host.forward.inverse_kernel,
    host.forward.solve_kernel,
    host.forward.state_kernel,
    host.forward.output_kernel,
]
BACKWARD = [getattr(host.backward, name) for name in vars(host.backward) if name.endswith("_pull_kernel")]


def compile_one(
    compiles: Compiles,
    kernel: Any,
    dtype: torch.dtype,
    keys: int,
    values: int,
    chunk: int = 64,
    packed: bool = True,
    **given: Any,
) -> None:
    q, v = (torch.empty(1, 128, 2, size, dtype=dtype, device="meta") for size in (keys, values))
    start = host.Launch(q, v, q if packed else None, chunk)
    constants, options = start.constants(kernel), start.options(kernel) | given
    types = {name: "*fp32" if name in FP32 else "*" + NAMES[dtype] for name in kernel.arg_names}
    types |= {"tokens": "i32", "heads": "i32", "documents": "*i32"}
    if not packed:
        constants |= {"documents": None, "initial": None, "final_pull": None}
    compiles(kernel, types, {name: value for name, value in constants.items() if name in kernel.arg_names}, **options)


@pytest.mark.parametrize("kernel", [host.forward.state_kernel, host.backward.query_pull_kernel])
def test_compiles_for_an_h200(compiles: Compiles, kernel: Any) -> None:
    compile_one(compiles, kernel, torch.bfloat16, 64, 64)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("kernel", [host.forward.state_kernel, host.backward.state_pull_kernel])
@pytest.mark.parametrize("processors", [132, 1])
def test_fine_and_wide_tiles_fit_into_smaller_gpus_too(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, processors: int, kernel: Any, capability: int
) -> None:
    monkeypatch.setattr(host.kernel, "_INTERPRETED_PROCESSORS", processors)
    compile_one(compiles, kernel, torch.bfloat16, 64, 64, capability=capability, divisible_by_16=("heads",))


def test_tiles_are_fine_where_most_of_a_device_would_wait_and_wide_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.kernel, "_INTERPRETED_PROCESSORS", 132)

    def tiles(batch: int, dtype: torch.dtype, size: int = 64, chunk: int = 64) -> tuple[Any, Any]:
        q = torch.empty(batch, 128, 12, size, dtype=dtype, device="meta")
        return host.Launch(q, q, None, chunk).tiles, host.tiles_for(q, q, chunk)

    for batch in (1, 2):
        fine, usual = tiles(batch, torch.bfloat16)
        assert (fine.values, fine.stages) == (16, 3) and (usual.values, usual.stages) == (32, 2)
        assert fine == replace(usual, values=16, stages=3)
    for few in (tiles(4, torch.bfloat16), tiles(1, torch.float32), tiles(1, torch.bfloat16, 128)):
        assert few[0] == few[1]
    wide, usual = tiles(22, torch.bfloat16)
    assert wide == replace(usual, values=64)
    assert tiles(22, torch.bfloat16, 40)[0].values == 64 and tiles(22, torch.bfloat16, 30)[0].values == 32
    for other in (tiles(21, torch.bfloat16), tiles(22, torch.float32), tiles(22, torch.bfloat16, 128)):
        assert other[0] == other[1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*FORWARD, *BACKWARD], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (96, 96), (16, 256), (256, 32)])
def test_compiles_for_every_size(compiles: Compiles, kernel: Any, dtype: torch.dtype, keys: int, values: int) -> None:
    compile_one(compiles, kernel, dtype, keys, values)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*FORWARD, *BACKWARD], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_compiles_for_every_chunk_without_documents(compiles: Compiles, kernel: Any, chunk: int) -> None:
    compile_one(compiles, kernel, torch.bfloat16, 64, 64, chunk, packed=False)
