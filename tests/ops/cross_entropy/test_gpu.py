"""Tests the Triton kernels on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.ops.cross_entropy import cross_entropy, reference

triton = pytest.importorskip("redline.ops.cross_entropy.triton")
Agrees = Callable[..., None]

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(rows: int, classes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, classes, device="cuda", dtype=dtype, requires_grad=True)
    return logits, torch.randint(classes, (rows,), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(1, 128_256), (37, 50_257), (130, 4_096), (70, 4_097), (9, 1_000)])
def test_agrees_in_every_dtype(agrees: Agrees, rows: int, classes: int, dtype: torch.dtype) -> None:
    logits, target = torch.randn(rows, classes) * 3, torch.randint(classes, (rows,))
    target[1::5] = -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        one, other = (partial(module.cross_entropy, **options) for module in (triton, reference))
        agrees(one, other, (logits, target), dtype, "cuda")


def test_agrees_past_two_to_the_31_logits() -> None:
    rows, classes = 17_000, 128_256
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(classes, (rows,), device="cuda")
    loss = triton.cross_entropy(logits, target, reduction="none")
    last = slice(rows - 64, rows)
    expected = reference.cross_entropy(logits[last].double(), target[last], reduction="none")
    torch.testing.assert_close(loss[last].double(), expected, atol=1e-4, rtol=1e-5)
    (gradient,) = torch.autograd.grad(triton.cross_entropy(logits.requires_grad_(), target, reduction="sum"), logits)
    exact = logits[last].detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference.cross_entropy(exact, target[last], reduction="sum"), exact)
    assert (gradient[last].double() - expected).norm() <= 0.01 * expected.norm()


def test_is_deterministic() -> None:
    logits, target = inputs(500, 32_000)

    def results() -> tuple[Tensor, ...]:
        loss = cross_entropy(logits, target, z_loss=1e-4)
        return loss, *torch.autograd.grad(loss, logits)

    first = results()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, results(), strict=True))


def test_a_cuda_graph_replays_with_new_inputs() -> None:
    """A capture fails if the host synchronizes."""
    logits, target = inputs(64, 10_001, torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(cross_entropy(logits, target), logits)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
    for ignored in (5, 40):
        with torch.no_grad():
            logits.normal_()
            target.random_(10_001)
            target[:ignored] = -100
        graph.replay()
        exact = logits.detach().double().requires_grad_()
        expected = reference.cross_entropy(exact, target)
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected, exact)[0], atol=1e-7, rtol=1e-4)


def test_an_invalid_target_is_nan_and_reads_no_other_memory() -> None:
    logits, target = inputs(8, 1_000)
    target[3], target[5] = 2**50, -(2**50)
    loss = cross_entropy(logits, target, reduction="none")
    torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_inductor_compiles_training_without_graph_breaks() -> None:
    logits, target = inputs(200, 5_003)

    def head(logits: Tensor) -> Tensor:
        return cross_entropy(logits * 2, target, label_smoothing=0.1, z_loss=1e-3)

    compiled, eager = torch.compile(head, fullgraph=True)(logits), head(logits)
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)
    (one,), (other,) = torch.autograd.grad(compiled, logits), torch.autograd.grad(eager, logits)
    assert (one - other).norm() <= 0.02 * other.norm()
