"""Tests the Triton kernels on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.ops.titans_memory import TitansState, reference, titans_memory

triton = pytest.importorskip("redline.ops.titans_memory.triton")
Agrees = Callable[..., None]
Make = Callable[..., Any]

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Values are rounded several times, and the gradients of gates are sums of products of rounded values.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 256}
# Every length in one dtype; the other dtypes at one length that is not a multiple of the chunk, and fp32 tiles.
LENGTHS = [(torch.bfloat16, tokens) for tokens in (1, 63, 64, 131, 700)]
LENGTHS += [(torch.float16, 131), (torch.float32, 64), (torch.float32, 131)]
SIZES = [(16, 16), (32, 48), (96, 96), (128, 128), (64, 128), (100, 8)]
HEADS = [(torch.bfloat16, *sizes) for sizes in SIZES]
HEADS += [(torch.float16, 64, 128), *((torch.float32, *sizes) for sizes in ((16, 16), (96, 96), (128, 128), (100, 8)))]


def check(agrees: Agrees, made: Any, dtype: torch.dtype, chunk: int = 64) -> None:
    tensors, state, documents = made
    documents = None if documents is None else documents.cuda()

    def flat(form: Callable[..., tuple[Tensor, TitansState]], *given: Tensor) -> tuple[Tensor, ...]:
        before = None if state is None else TitansState(*given[6:], state.position_B.cuda())
        o, after = form(*given[:6], before, documents, chunk)
        return o, *after[:3], after.position_B.double()

    pair = (partial(flat, one) for one in (triton.titans_memory, reference.chunked))
    agrees(*pair, [*tensors, *(() if state is None else state[:3])], dtype, "cuda", ROUNDINGS[dtype])


def tamed(made: Any) -> Any:
    """Returns gates as in a trained model: slow decay, so that the past matters, and small learning rates."""
    (q, k, v, alpha, eta, theta), state, documents = made
    return [q, k, v, alpha * 0.05, eta * 0.9, theta * 0.1], state, documents


@pytest.mark.parametrize(("dtype", "tokens"), LENGTHS)
@pytest.mark.parametrize("cut", [False, True])
def test_agrees_in_every_dtype(agrees: Agrees, inputs: Make, tokens: int, dtype: torch.dtype, cut: bool) -> None:
    check(agrees, inputs(2, tokens, 3, 64, 64, 64, cut, cut), dtype)
    check(agrees, tamed(inputs(2, tokens, 3, 64, 64, 64, cut, cut)), dtype)


@pytest.mark.parametrize(("dtype", "keys", "values"), HEADS)
def test_agrees_at_every_head_size(agrees: Agrees, inputs: Make, keys: int, values: int, dtype: torch.dtype) -> None:
    check(agrees, inputs(1, 200, 2, keys, values, 64, True, True), dtype)


def test_agrees_with_many_programs(agrees: Agrees, inputs: Make) -> None:
    """The other tests have few sequences, which use smaller blocks."""
    check(agrees, tamed(inputs(5, 300, 24, 64, 64, 64, True, True)), torch.bfloat16)


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("cut", [False, True])
def test_agrees_with_smaller_chunks(agrees: Agrees, inputs: Make, chunk: int, cut: bool) -> None:
    check(agrees, inputs(2, 150, 2, 64, 64, chunk, cut, cut), torch.float32, chunk)


def test_a_sequence_may_be_split_anywhere(inputs: Make) -> None:
    tensors = [one.cuda() for one in tamed(inputs(2, 300, 2, 64, 64, 64))[0]]
    whole, last = titans_memory(*tensors)
    now, outputs = None, []
    for begin, end in ((0, 77), (77, 78), (78, 128), (128, 300)):
        o, now = titans_memory(*(one[:, begin:end] for one in tensors), now)
        outputs.append(o)
    assert now is not None and torch.equal(now.position_B, last.position_B)
    for one, other in zip((torch.cat(outputs, 1), *now[:3]), (whole, *last[:3]), strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm()


def test_is_deterministic(inputs: Make) -> None:
    given, _, documents = tamed(inputs(4, 1000, 12, 64, 64, 64, packed=True))
    tensors, documents = [one.cuda().bfloat16().requires_grad_() for one in given], documents.cuda()

    def results() -> tuple[Tensor, ...]:
        out, last = triton.titans_memory(*tensors, None, documents)
        gradients = torch.autograd.grad(out.float().square().sum() + last.memory_BHKV.square().sum(), tensors)
        return out, *last[:3], *gradients

    first = results()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, results(), strict=True))


def test_auto_uses_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch, inputs: Make) -> None:
    called: list[str] = []
    monkeypatch.setattr(triton, "titans_memory", lambda *_: called.append("triton"))
    for dtype in DTYPES:
        titans_memory(*(one.cuda().to(dtype) for one in inputs(1, 5, 1, 16, 16, 64)[0]))
    assert len(called) == len(DTYPES)


def test_a_fallback_warns(inputs: Make) -> None:
    with pytest.warns(UserWarning, match="slower: unsupported dtype float64"):
        titans_memory(*(one.cuda().double() for one in inputs(1, 5, 1, 16, 16, 64)[0]))


def test_runs_inside_a_cuda_graph(inputs: Make) -> None:
    given, _, documents = tamed(inputs(2, 200, 2, 64, 64, 64, packed=True))
    tensors, documents = [one.cuda().requires_grad_() for one in given], documents.cuda()

    def step() -> tuple[Tensor, ...]:
        out, last = titans_memory(*tensors, None, documents)
        # Detached, because its history would bind the inputs to the stream of the first call.
        return out.detach(), *torch.autograd.grad(out.square().sum() + last.memory_BHKV.square().sum(), tensors)

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
    tensors = [one.cuda().bfloat16().requires_grad_() for one in tamed(inputs(2, 200, 2, 64, 64, 64))[0]]

    def block(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return torch.nn.functional.gelu(titans_memory(q, k, v * 2, *gates)[0])

    compiled, eager = torch.compile(block, fullgraph=True)(*tensors), block(*tensors)
    found = (compiled, *torch.autograd.grad(compiled.float().square().sum(), tensors))
    expected = (eager, *torch.autograd.grad(eager.float().square().sum(), tensors))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
