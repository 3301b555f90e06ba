"""The kernels of causal attention go through the whole compiler, ptxas included, for GPUs that are not here."""

from collections.abc import Callable

import pytest
import torch

host = pytest.importorskip("redline.ops.causal_attention.triton")
kernels = pytest.importorskip("redline.ops.causal_attention.triton_kernels")
pytestmark = pytest.mark.skipif(host.INTERPRETED, reason="nothing is compiled when interpreted")
KERNELS = {what: getattr(kernels, f"causal_attention_{what}_kernel") for what in ("forward", "queries", "keys")}
STRIDES = [f"{name}_{of}" for name in ("q", "k", "v", "pull", "far_q", "far_k") for of in ("token", "head")]
FAR = ("far_q", "far_k", "bias", "first", "far_q_pull", "far_k_pull", "bias_pull", "final")
NUMBERS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROOM = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def compile_kernel(
    compiles: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    dim: int,
    name: str,
    capability: int,
    lowest: str = "*i32",
    far: bool = True,
) -> None:
    monkeypatch.setattr(host.kernel, "shared_bytes", lambda _: ROOM[capability])
    kernel, q = KERNELS[what], torch.empty(1, 12, dim, dtype=NUMBERS[name], device="meta")
    tiles = host.tiles_for(what, q)
    constants = host._constants(q, q[:, :4], tiles)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "size": "fp32"}
    types |= dict.fromkeys(("logs", "dots", "bias", "bias_pull"), "*fp32")
    types |= dict.fromkeys(("lowest", "first"), lowest) | dict.fromkeys(("highest", "final"), "*i32")
    types |= dict.fromkeys(("q", "k", "v", "out", "pull", "q_pull", "k_pull", "v_pull"), f"*{name}")
    types |= dict.fromkeys(("far_q", "far_k", "far_q_pull", "far_k_pull"), f"*{name}")
    if not far:
        constants |= dict.fromkeys(name for name in FAR if name in kernel.arg_names)
    given = [name for name in (*STRIDES, "tokens") if name in kernel.arg_names]
    compiles(kernel, types, constants, capability, warps, stages, given, tiles.kib * 1024)


@pytest.mark.parametrize(("what", "far"), [*((what, True) for what in KERNELS), ("keys", False)])
def test_compiles_for_an_h200(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str, far: bool
) -> None:
    compile_kernel(compiles, monkeypatch, what, 64, "bf16", 90, far=far)


def test_the_sums_of_pulls_compile(compiles: Callable[..., None]) -> None:
    kernel = kernels.causal_attention_dots_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"out": "*bf16", "pull": "*bf16", "dots": "*fp32"}
    compiles(kernel, types, {"HEADS": 12, "D": 64, "M": host._DOTS_ROWS})


@pytest.mark.slow
@pytest.mark.parametrize("what", KERNELS)
def test_compiles_without_what_is_far(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    compile_kernel(compiles, monkeypatch, what, 64, "bf16", 90, far=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", KERNELS)
def test_takes_long_numbers_of_tokens(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    compile_kernel(compiles, monkeypatch, what, 64, "bf16", 90, lowest="*i64")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dim", host.HEAD_DIMS)
@pytest.mark.parametrize("what", KERNELS)
def test_compiles_for_every_size(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch, what: str, dim: int, name: str, capability: int
) -> None:
    compile_kernel(compiles, monkeypatch, what, dim, name, capability)
