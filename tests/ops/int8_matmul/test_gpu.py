"""Tests the int8 ops on a GPU: decoder sizes, odd sizes, every dtype, CUDA graphs and compilation."""

import pytest
import torch
from torch import Tensor

from redline.ops.int8_matmul import int8_matmul, int_mm, reference, weight_only_matmul

triton = pytest.importorskip("redline.ops.int8_matmul.triton")

pytestmark = pytest.mark.gpu
# Tensor cores compute fp32 products as three TF32 products.
LIMITS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}
SIZES = [(2048, 8192), (16_384, 2048), (512, 2048), (1000, 999), (3, 5000), (128, 256)]


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def scales(count: int) -> Tensor:
    return (torch.rand(count, device="cuda") + 0.1) / 1000


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64, 200])
@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_int8_rows_agree(rows: int, columns: int, depth: int) -> None:
    x, w, bias = whole(rows, depth), whole(columns, depth), torch.randn(columns, device="cuda")
    given = (x, w, scales(rows), scales(columns), bias)
    expected = reference.int8_matmul(*given, out_dtype=torch.float64)
    for dtype in LIMITS:
        assert error(triton.int8_matmul(*given, out_dtype=dtype), expected) <= torch.finfo(dtype).eps
        assert error(int8_matmul(*given, out_dtype=dtype), expected) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 200])
@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_floating_point_rows_agree(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, w, w_scale = torch.randn(rows, depth, device="cuda").to(dtype), whole(columns, depth), scales(columns)
    exact = reference.weight_only_matmul(x.double(), w, w_scale)
    assert error(triton.weight_only_matmul(x, w, w_scale), exact) <= LIMITS[dtype]
    assert error(weight_only_matmul(x, w, w_scale), exact) <= LIMITS[dtype]


@pytest.mark.parametrize(("rows", "columns", "depth"), [(16, 64, 64), (17, 63, 64), (17, 64, 63), (17, 64, 64)])
def test_int_mm_refuses_the_shapes_that_auto_avoids(rows: int, columns: int, depth: int) -> None:
    x, w = whole(rows, depth), whole(columns, depth)
    if not int_mm.why_not(x, w):
        torch._int_mm(x, w.t())
        return
    with pytest.raises(RuntimeError):
        torch._int_mm(x, w.t())


def test_is_deterministic() -> None:
    x, w, w_scale = torch.randn(4, 8192, device="cuda").bfloat16(), whole(512, 8192), scales(512)
    first = weight_only_matmul(x, w, w_scale)
    assert all(torch.equal(first, weight_only_matmul(x, w, w_scale)) for _ in range(3))


def test_a_cuda_graph_replays_with_new_inputs() -> None:
    x, w, x_scale, w_scale = whole(4, 4096), whole(256, 4096), scales(4), scales(256)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float32)
    for _ in range(2):
        x.copy_(whole(4, 4096))
        graph.replay()
        assert error(out, reference.int8_matmul(x, w, x_scale, w_scale, out_dtype=torch.float64)) <= 1e-6


def test_inductor_compiles_them_without_graph_breaks() -> None:
    x, w, x_scale, w_scale = whole(4, 256), whole(512, 256), scales(4), scales(512)

    def layers(x: Tensor) -> Tensor:
        return int8_matmul(x, w, x_scale, w_scale).sin() + weight_only_matmul(x.bfloat16() * 2, w, w_scale)

    assert error(torch.compile(layers, fullgraph=True)(x), layers(x)) <= 0.01
