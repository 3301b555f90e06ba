"""Tests the Triton kernels on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.ops.gated_delta_rule import gated_delta_rule, reference

triton = pytest.importorskip("redline.ops.gated_delta_rule.triton")
Agrees = Callable[..., None]
Make = Callable[..., Any]

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Values are rounded several times, and the gradient of g is a difference of sums.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 256}
# Every length in one dtype; the other dtypes at one length that is not a multiple of the chunk, and fp32 tiles.
LENGTHS = [(torch.bfloat16, tokens) for tokens in (1, 63, 64, 131, 1000)]
LENGTHS += [(torch.float16, 131), (torch.float32, 64), (torch.float32, 131)]
SIZES = [(16, 16), (32, 48), (96, 96), (128, 128), (64, 128), (256, 256), (200, 8)]
HEADS = [(torch.bfloat16, *sizes) for sizes in SIZES]
HEADS += [(torch.float16, 64, 128), *((torch.float32, *sizes) for sizes in ((16, 16), (96, 96), (256, 256), (200, 8)))]


def chunks(implementation: Any, documents: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    *given, state = (*tensors, None)[:6]
    return implementation(*given, state, documents)


def check(agrees: Agrees, tensors: list[Tensor | None], dtype: torch.dtype) -> None:
    *given, documents = tensors
    documents = None if documents is None else documents.cuda()
    pair = (partial(chunks, one, documents) for one in (triton.gated_delta_rule, reference.chunked))
    agrees(*pair, [one for one in given if one is not None], dtype, "cuda", ROUNDINGS[dtype])


@pytest.mark.parametrize(("dtype", "tokens"), LENGTHS)
def test_agrees_in_every_dtype(agrees: Agrees, inputs: Make, tokens: int, dtype: torch.dtype) -> None:
    check(agrees, inputs(2, tokens, 3, 64, 64, carried=True, packed=True), dtype)
    check(agrees, inputs(2, tokens, 3, 64, 64), dtype)


@pytest.mark.parametrize(("dtype", "keys", "values"), HEADS)
def test_agrees_at_every_head_size(agrees: Agrees, inputs: Make, keys: int, values: int, dtype: torch.dtype) -> None:
    check(agrees, inputs(1, 300, 2, keys, values, carried=True, packed=True), dtype)


def test_agrees_over_a_long_sequence(agrees: Agrees, inputs: Make) -> None:
    tensors = inputs(1, 8192, 12, 64, 64, carried=True)
    tensors[3] = tensors[3] * 0.05  # so that it affects many chunks
    check(agrees, tensors, torch.bfloat16)


@pytest.mark.parametrize(("texts", "dtype"), [(5, torch.bfloat16), (5, torch.float16), (12, torch.bfloat16)])
def test_agrees_with_many_programs(agrees: Agrees, inputs: Make, texts: int, dtype: torch.dtype) -> None:
    """Few sequences use smaller blocks, as in the other tests, and very many use wider ones."""
    check(agrees, inputs(texts, 300, 24, 64, 64, carried=True, packed=True), dtype)


@pytest.mark.parametrize("chunk", [16, 32])
def test_agrees_with_smaller_chunks(inputs: Make, chunk: int) -> None:
    tensors = [one.cuda() for one in inputs(2, 150, 2, 64, 64)[:5]]
    found, expected = triton.gated_delta_rule(*tensors, chunk=chunk), reference.chunked(*tensors)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm()


def test_a_sequence_may_be_split_anywhere(inputs: Make) -> None:
    tensors = [one.cuda() for one in inputs(2, 300, 2, 64, 64)[:5]]
    whole, last = gated_delta_rule(*tensors)
    now, outputs = None, []
    for begin, end in ((0, 77), (77, 78), (78, 300)):
        o, now = gated_delta_rule(*(one[:, begin:end] for one in tensors), now)
        outputs.append(o)
    assert (torch.cat(outputs, 1) - whole).norm() <= 2e-5 * whole.norm() and (now - last).norm() <= 2e-5 * last.norm()


@pytest.mark.parametrize("size", [64, 128])
def test_is_deterministic(inputs: Make, size: int) -> None:
    tensors = [one.cuda().bfloat16().requires_grad_() for one in inputs(4, 1000, 12, size, size)[:5]]

    def results() -> tuple[Tensor, ...]:
        out, last = triton.gated_delta_rule(*tensors)
        return out, last, *torch.autograd.grad(out.float().square().sum() + last.square().sum(), tensors)

    first = results()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, results(), strict=True))


def test_a_decay_that_underflows_gives_no_nan(inputs: Make) -> None:
    tensors = [one.cuda().requires_grad_() for one in inputs(1, 200, 2, 64, 64)[:5]]
    out, last = triton.gated_delta_rule(*tensors[:3], tensors[3] * 2000, tensors[4])
    gradients = torch.autograd.grad(out.sum() + last.sum(), tensors)
    assert all(one.isfinite().all() for one in (out, last, *gradients))


def test_auto_uses_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch, inputs: Make) -> None:
    called: list[str] = []
    monkeypatch.setattr(triton, "gated_delta_rule", lambda *_, **__: called.append("triton"))
    for dtype in DTYPES:
        gated_delta_rule(*(one.cuda().to(dtype) for one in inputs(1, 5, 1, 16, 16)[:5]))
    assert len(called) == len(DTYPES)


def test_a_fallback_warns(inputs: Make) -> None:
    with pytest.warns(UserWarning, match="slower: unsupported dtype float64"):
        gated_delta_rule(*(one.cuda().double() for one in inputs(1, 5, 1, 16, 16)[:5]))


def test_runs_inside_a_cuda_graph(inputs: Make) -> None:
    tensors = [one.cuda().requires_grad_() for one in inputs(2, 200, 2, 64, 64)[:5]]

    def step() -> tuple[Tensor, ...]:
        out, last = gated_delta_rule(*tensors)
        # Detached, because its history would bind the inputs to the stream of the first call.
        return out.detach(), *torch.autograd.grad(out.square().sum() + last.square().sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        tensors[2].normal_()
    graph.replay()
    for one, other in zip(found, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_inductor_compiles_training_without_graph_breaks(inputs: Make) -> None:
    tensors = [one.cuda().bfloat16().requires_grad_() for one in inputs(2, 200, 2, 64, 64)[:5]]

    def block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gated_delta_rule(q, k, v * 2, g, beta)[0])

    compiled, eager = torch.compile(block, fullgraph=True)(*tensors), block(*tensors)
    found = (compiled, *torch.autograd.grad(compiled.float().square().sum(), tensors))
    expected = (eager, *torch.autograd.grad(eager.float().square().sum(), tensors))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_saved_memory_is_inputs_and_inverses(inputs: Make) -> None:
    tensors = [one.cuda().bfloat16().requires_grad_() for one in inputs(2, 2048, 4, 64, 64)[:5]]
    before = torch.cuda.memory_allocated()
    kept = triton.gated_delta_rule(*tensors)
    grown = torch.cuda.memory_allocated() - before
    # The output and the inverses have the size of v each; the rest is one value per token and head, and the state.
    assert kept[0].nbytes * 2 < grown < kept[0].nbytes * 2.6
