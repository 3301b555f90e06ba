"""Tests that int8 weights of torchao are read without dequantizing them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.rewrites.quantize import quantize_layer, torchao_quantization
from redline.nn.linear import Linear, int8_parts
from redline.ops.int8_matmul import weight_only_matmul

ao = torchao_quantization()
WEIGHT_ONLY = ao.Int8WeightOnlyConfig(set_inductor_config=False)


def quantized(layer: nn.Linear, config: object = WEIGHT_ONLY) -> nn.Linear:
    other = copy.deepcopy(layer)
    quantize_layer("int8", "layer", other, config)
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_int8_parts_reproduce_the_layer(dtype: torch.dtype) -> None:
    layer = quantized(Linear(67, 96).to(dtype))
    parts = int8_parts(layer.weight)
    assert parts is not None
    x = torch.randn(5, 67, dtype=dtype)
    found, expected = weight_only_matmul(x, *parts, layer.bias), layer(x)
    assert (found - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: layer,
        lambda layer: quantized(layer, ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)),
        lambda layer: quantized(layer, ao.Float8WeightOnlyConfig(set_inductor_config=False)),
        lambda layer: quantized(layer, ao.Int8WeightOnlyConfig(granularity=ao.PerTensor(), set_inductor_config=False)),
    ],
    ids=["plain", "int8 inputs", "fp8", "one scale for all"],
)
def test_other_weights_have_no_int8_parts(make: Callable[[nn.Linear], nn.Linear]) -> None:
    assert int8_parts(make(nn.Linear(64, 32)).weight) is None


def test_asymmetric_quantization_has_no_int8_parts() -> None:
    layer = quantized(nn.Linear(64, 32))
    layer.weight.zero_point.fill_(3)
    assert int8_parts(layer.weight) is None


def test_caching_the_parts_does_not_change_the_layer() -> None:
    layer = quantized(Linear(64, 32))
    assert isinstance(layer, Linear)
    names = set(layer.state_dict())
    first = layer._int8()
    assert first is not None and layer._int8() is first and set(layer.state_dict()) == names
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    quantize_layer("int8", "layer", other := Linear(64, 32), WEIGHT_ONLY)
    layer.weight = other.weight
    assert layer._int8() is not first


@torch.no_grad()
def test_a_compiled_layer_reads_the_int8_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts must be cached before, because a compiler cannot read the zero points."""
    layer = quantized(Linear(64, 32))
    layer.implementation = "auto"
    monkeypatch.setattr(Linear, "_kernels_allowed", lambda self, x: True)
    calls: list[int] = []

    def counted(*args: Tensor, **kwargs: str) -> Tensor:
        calls.append(len(args[0]))
        return weight_only_matmul(*args, **kwargs)

    monkeypatch.setattr("redline.nn.linear.weight_only_matmul", counted)
    x = torch.randn(3, 64)
    expected = nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    for seen in (False, True):
        torch.compiler.reset()
        if seen:
            layer.pack(x.device)
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert bool(calls) == seen


@torch.no_grad()
def test_moving_a_weight_invalidates_the_cache() -> None:
    layer = quantized(Linear(64, 32))
    assert isinstance(layer, Linear)
    first = layer._int8()
    assert first is not None
    layer.to(torch.float64)
    again = layer._int8()
    assert again is not None and again is not first and again[0] is layer.weight.qdata


def test_a_cpu_uses_torch() -> None:
    layer = quantized(Linear(64, 32))
    layer.implementation = "auto"
    assert layer.active_implementation() == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 32, 33, 64, 65])
# Rows of 264 bytes are not aligned to 16 bytes.
@pytest.mark.parametrize(("inputs", "most"), [(272, 64), (264, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_gpu_uses_the_kernel(
    rows: int, inputs: int, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = quantized(Linear(inputs, 520).cuda().to(dtype))
    layer.implementation = "auto"
    assert layer.active_implementation() == f"int8_matmul up to {most} rows"
    calls: list[int] = []

    def counted(*given: Tensor) -> Tensor:
        calls.append(len(given[0]))
        return by_kernel(*given)

    from redline.ops.int8_matmul import triton

    by_kernel = triton.weight_only_matmul
    monkeypatch.setattr(triton, "weight_only_matmul", counted)
    x = torch.randn(1, rows, inputs, device="cuda", dtype=dtype)
    found = layer(x)
    exact = nn.functional.linear(x.double(), layer.weight.dequantize().double(), layer.bias.double())
    assert calls == ([rows] if rows <= most else [])
    assert (found - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()
