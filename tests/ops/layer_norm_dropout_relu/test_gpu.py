"""Tests LayerNorm, dropout and ReLU on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.layer_norm_dropout_relu import layer_norm_dropout_relu, reference

pytestmark = pytest.mark.gpu
Agrees = Callable[..., None]
EPS = 1e-5


def check(agrees: Agrees, given: tuple[Tensor, Tensor, Tensor], p: float, dtype: torch.dtype) -> None:
    seed = torch.randint(2**63 - 1, (), device="cuda")
    agrees(
        lambda *tensors: layer_norm_dropout_relu(*tensors, p, EPS, seed=seed),
        lambda *exact: reference.layer_norm_dropout_relu(*exact, p, EPS, seed),
        given,
        dtype,
        "cuda",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "width"), [(61, 64), (9, 768), (5, 1001), (3, 4096), (2, 8192), (1, 20_000)])
def test_agrees(
    agrees: Agrees, inputs: Callable[..., tuple[Tensor, ...]], rows: int, width: int, p: float, dtype: torch.dtype
) -> None:
    check(agrees, inputs(rows, width, dtype), p, dtype)


@pytest.mark.parametrize(("rows", "width"), [(16384, 4096), (65536, 768), (30_001, 100)])
def test_agrees_at_full_size(agrees: Agrees, rows: int, width: int) -> None:
    # A few elements cross zero here, which the tolerance of bf16 allows.
    check(
        agrees, (torch.randn(rows, width, device="cuda"), torch.randn(width), torch.randn(width)), 0.1, torch.bfloat16
    )


def test_is_deterministic(repeats: Callable[..., None]) -> None:
    shapes = (2000, 768), (768,), (768,)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    repeats(lambda *given: layer_norm_dropout_relu(*given, 0.1, EPS, seed=3), inputs)


def test_each_cuda_graph_replay_drops_other_elements() -> None:
    x, weight, bias = (
        torch.randn(64, 256, device="cuda"),
        torch.zeros(256, device="cuda"),
        torch.ones(256, device="cuda"),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer_norm_dropout_relu(x, weight, bias, 0.5)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer_norm_dropout_relu(x, weight, bias, 0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    assert abs((out > 0).double().mean().item() - 0.5) < 0.05


def test_inductor_compiles_training_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    shapes = (640, 768), (768,), (768,)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    compiled_agrees(lambda *given: layer_norm_dropout_relu(*given, 0.1, EPS, seed=3).sin(), inputs)
