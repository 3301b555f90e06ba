"""Tests the Triton kernels on a GPU: decoder sizes, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.small_matmul import reference, small_matmul

triton = pytest.importorskip("redline.ops.small_matmul.triton")
Agrees = Callable[..., None]

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LLAMA = [(3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("columns", "depth"), [(2048, 8192), (512, 2048), (1000, 999), (3, 5000), (777, 40)])
def test_agrees_in_every_dtype(agrees: Agrees, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    given = (torch.randn(rows, depth), torch.randn(columns, depth, device="cuda"), torch.randn(columns))
    agrees(triton.small_matmul, reference.small_matmul, given, dtype, "cuda")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("columns", "depth"), LLAMA)
def test_agrees_at_decoder_sizes_and_is_deterministic(rows: int, columns: int, depth: int) -> None:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    found = small_matmul(x, w)
    expected = x.float() @ w.float().t()
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()
    assert all(torch.equal(found, small_matmul(x, w)) for _ in range(3))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_cuda_graph_replays_with_new_inputs(rows: int) -> None:
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    w = torch.randn(256, 4096, device="cuda", dtype=torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        small_matmul(x, w)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        out = small_matmul(x, w)
    for _ in range(2):
        x.normal_()
        graph.replay()
        expected = x.double() @ w.double().t()
        assert (out.double() - expected).norm() <= 2e-3 * expected.norm()


def test_inductor_compiles_training_without_graph_breaks() -> None:
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(small_matmul(x * 2, w))

    compiled, eager = torch.compile(layer, fullgraph=True)(x), layer(x)
    found = (compiled, *torch.autograd.grad(compiled.square().sum(), (x, w)))
    expected = (eager, *torch.autograd.grad(eager.square().sum(), (x, w)))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
