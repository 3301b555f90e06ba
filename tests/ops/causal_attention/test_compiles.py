"""The kernels of causal attention go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest
import torch

host = pytest.importorskip("redline.ops.causal_attention.triton")
kernels = pytest.importorskip("redline.ops.causal_attention.triton_kernels")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")
KERNELS = {"forward": kernels.forward_kernel, "queries": kernels.queries_kernel, "keys": kernels.keys_kernel}
NUMBERS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROOM = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def compile_kernel(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str, dim: int, name: str, capability: int
) -> None:
    monkeypatch.setattr(host.kernel, "shared_bytes", lambda _: ROOM[capability])
    kernel, q = KERNELS[what], torch.empty(1, 12, dim, dtype=NUMBERS[name], device="meta")
    constants = host._constants(q, q[:, :4], host.tiles_for(what, q))
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "size": "fp32"}
    types |= dict.fromkeys(("logs", "dots"), "*fp32") | dict.fromkeys(("lowest", "highest"), "*i32")
    types |= dict.fromkeys(("q", "k", "v", "out", "pull", "q_pull", "k_pull", "v_pull"), f"*{name}")
    compiles(kernel, types, constants, capability, warps, stages)


@pytest.mark.parametrize("what", KERNELS)
def test_compiles_for_an_h200(compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    compile_kernel(compiles, monkeypatch, what, 64, "bf16", 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dim", host.HEAD_DIMS)
@pytest.mark.parametrize("what", KERNELS)
def test_compiles_for_every_size(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str, dim: int, name: str, capability: int
) -> None:
    compile_kernel(compiles, monkeypatch, what, dim, name, capability)
