"""Tests linear cross-entropy on a GPU: full size, every dtype, its memory, CUDA graphs and compilation."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from redline.ops.linear_cross_entropy import linear_cross_entropy, reference

triton = pytest.importorskip("redline.ops.linear_cross_entropy.triton")
chunks = pytest.importorskip("redline.ops.linear_cross_entropy.chunks")
Agrees = Callable[..., None]

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The logits and their gradients are rounded to the dtype.
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4}


def inputs(rows: int, features: int, classes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    hidden = torch.randn(rows, features, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, features, device="cuda") * features**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (rows,), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features", "classes"), [(1, 64, 50_257), (300, 128, 5_003), (257, 61, 1_000)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_agrees_in_every_dtype(
    agrees: Agrees,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype,
    reduction: str,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**20)
    given = (torch.randn(rows, features), torch.randn(classes, features) * features**-0.5)
    target, bias = torch.randint(classes, (rows,)), torch.randn(classes)
    target[1::5] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction}
    one, other = (partial(module.linear_cross_entropy, **options) for module in (triton, reference))
    agrees(one, other, (*given, target, bias), dtype, "cuda", ROUNDINGS.get(dtype))


def test_agrees_at_full_size_within_its_memory_limit() -> None:
    hidden, weight, target = inputs(8192, 4096, 128_256)
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - hidden.nbytes - weight.nbytes
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, target)
    found = torch.autograd.grad(loss, (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - others
    assert peak <= 5.5 * 2**30, f"{peak / 2**30:.2f} GiB, weights and rows included"
    rows = 512  # the limit for fp32 logits
    exact = hidden[:rows].detach().float().requires_grad_()
    expected = reference.linear_cross_entropy(exact, weight.detach().float(), target[:rows], reduction="sum")
    (of_hidden,) = torch.autograd.grad(expected / len(hidden), exact)
    assert (found[0][:rows].float() - of_hidden).norm() <= 0.02 * of_hidden.norm()
    # The gradient of a class is a sum over all rows, so a few classes are sufficient.
    with torch.no_grad():
        few = torch.arange(0, 128_256, 2_003, device="cuda")
        of_weight = torch.zeros(len(few), 4096, device="cuda")
        for part, wanted in zip(hidden.split(1024), target.split(1024), strict=True):
            logits = part.float() @ weight.float().t()
            slope = logits.softmax(1)
            slope[torch.arange(len(part), device="cuda"), wanted] -= 1
            of_weight += slope[:, few].t() @ part.float() / len(hidden)
    assert (found[1][few].float() - of_weight).norm() <= 0.02 * of_weight.norm()


def test_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**24)
    hidden, weight, target = inputs(1000, 256, 32_000)

    def results() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, target)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    first = results()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, results(), strict=True))


def test_a_cuda_graph_replays_with_new_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture fails if the host synchronizes."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**20)
    hidden, weight, target = inputs(300, 64, 1_003, torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(hidden, weight, target)
        found = torch.autograd.grad(loss, (hidden, weight))
    for ignored in (5, 290):
        with torch.no_grad():
            hidden.normal_()
            target.random_(1_003)
            target[:ignored] = -100
        graph.replay()
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        expected = reference.linear_cross_entropy(*exact, target)
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
        for one, other in zip(found, torch.autograd.grad(expected, exact), strict=True):
            assert (one.double() - other).norm() <= 1e-5 * other.norm()


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_inductor_compiles_training_without_graph_breaks() -> None:
    hidden, weight, target = inputs(200, 64, 5_003)

    def head(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(torch.nn.functional.gelu(hidden), weight, target, z_loss=1e-3)

    compiled, eager = torch.compile(head, fullgraph=True)(hidden), head(hidden)
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)
    found, expected = (torch.autograd.grad(loss, (hidden, weight)) for loss in (compiled, eager))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_autocast_lowers_the_matrix_products() -> None:
    hidden, weight, target = inputs(40, 64, 1_000, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    exact = linear_cross_entropy(hidden, weight, target)
    assert all(one.dtype == torch.float32 for one in gradients)
    assert 0 < (loss - exact).abs() <= 0.01 * exact
