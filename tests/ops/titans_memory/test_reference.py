"""Tests the two reference forms of the Titans memory against each other, and properties of a memory."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.titans_memory import TitansState, titans_memory, titans_step
from redline.ops.titans_memory.reference import chunked, recurrent

LENGTHS = [(1, 4), (3, 8), (8, 8), (29, 5), (37, 16)]


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Returns q, k, v, alpha, eta and theta of 2 heads with keys of 5 and values of 3; some gates are 0 or 1."""
    q, k = (F.normalize(torch.randn(batch, tokens, 2, 5, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(batch, tokens, 2, 3, dtype=dtype)
    gates = (torch.rand(batch, tokens, 2, dtype=dtype).mul(1.4).sub(0.2).clamp(0, 1) for _ in range(3))
    return q, k, v, *gates


def documents(batch: int, tokens: int) -> Tensor:
    return (torch.rand(batch, tokens) < 0.15).cumsum(1).int()


def state(batch: int, chunk: int) -> TitansState:
    matrices = [torch.randn(batch, 2, 5, 3, dtype=torch.float64) for _ in range(3)]
    return TitansState(*matrices, torch.randint(chunk, (batch,), dtype=torch.int32))


def close(found: tuple[Tensor, TitansState], expected: tuple[Tensor, TitansState], limit: float = 1e-12) -> None:
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).abs().max() <= limit


@pytest.mark.parametrize(("tokens", "chunk"), LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_the_chunked_form_agrees_with_the_recurrent_form(tokens: int, chunk: int, packed: bool, carried: bool) -> None:
    before = state(3, chunk) if carried else None
    given = (*inputs(3, tokens), before, documents(3, tokens) if packed else None, chunk)
    close(chunked(*given), recurrent(*given))


def test_the_recurrent_form_is_the_equation() -> None:
    q, k, v, alpha, eta, theta = (tensor[0, :, 0] for tensor in inputs(1, 7))
    M = S = M0 = torch.zeros(5, 3, dtype=torch.float64)
    expected = []
    for t in range(7):
        M0 = M if t % 3 == 0 else M0
        S = eta[t] * S - theta[t] * torch.outer(k[t], M0.T @ k[t] - v[t])
        M = (1 - alpha[t]) * M + S
        expected.append(M.T @ q[t])
    o, last = recurrent(*(tensor[None, :, None] for tensor in (q, k, v, alpha, eta, theta)), chunk=3)
    torch.testing.assert_close(o[0, :, 0], torch.stack(expected))
    torch.testing.assert_close((last.memory_BHKV[0, 0], last.momentum_BHKV[0, 0], last.anchor_BHKV[0, 0]), (M, S, M0))
    assert last.position_B.tolist() == [1]


def test_a_sequence_may_be_split_anywhere() -> None:
    tokens = 41
    given = inputs(2, tokens)
    whole = chunked(*given, chunk=8)
    cuts = sorted(random.sample(range(1, tokens), 4))
    now, outputs = None, []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        o, now = chunked(*(tensor[:, begin:end] for tensor in given), now, chunk=8)
        outputs.append(o)
    assert now is not None
    close((torch.cat(outputs, 1), now), whole)


@pytest.mark.parametrize("prefill", [7, 8, 11])
def test_decoding_continues_from_a_prefill(prefill: int) -> None:
    given = inputs(2, 19)
    borders = torch.tensor([[0] * 19, [0] * 3 + [1] * 16])  # so that the two are at different positions in their chunks
    whole = chunked(*given, None, borders, chunk=8)
    o, now = chunked(*(tensor[:, :prefill] for tensor in given), None, borders[:, :prefill], chunk=8)
    outputs = [o]
    for token in range(prefill, 19):
        o, now = titans_step(*(tensor[:, token] for tensor in given), now, chunk=8)
        outputs.append(o[:, None])
    close((torch.cat(outputs, 1), now), whole)


def test_packed_documents_agree_with_separate_ones() -> None:
    given, lengths = inputs(1, 48), (3, 1, 22, 8, 14)
    borders = torch.repeat_interleave(torch.tensor([2, 5, 6, 9, 10]), torch.tensor(lengths))[None].int()
    o, last = chunked(*given, None, borders, chunk=8)
    begin = 0
    for length in lengths:
        alone, end = chunked(*(tensor[:, begin : begin + length] for tensor in given), chunk=8)
        torch.testing.assert_close(o[:, begin : begin + length], alone, atol=1e-12, rtol=0)
        begin += length
    close((o, last), (o, end))


@pytest.mark.parametrize("position", [0, 7, 8, 20])
def test_is_causal(position: int) -> None:
    given = inputs(2, 23)
    o, _ = chunked(*given, chunk=8)
    for index in range(6):
        other = [tensor.clone() for tensor in given]
        other[index][:, position] += 0.1
        changed, _ = chunked(*other, chunk=8)
        assert torch.equal(changed[:, :position], o[:, :position])
        # The first token has no previous state to decay.
        assert torch.equal(changed[:, position], o[:, position]) == (position == 0 and index in (3, 4))


@pytest.mark.parametrize("form", [recurrent, chunked])
def test_passes_gradcheck_with_zero_gates(form: object) -> None:
    before = state(2, 4)
    given = [tensor.requires_grad_() for tensor in (*inputs(2, 7), *before[:3])]
    borders = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [0, 0, 2, 2, 2, 2, 2]])
    assert callable(form)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, last = form(*tensors[:6], TitansState(*tensors[6:], before.position_B), borders, 4)
        return o, *last[:3]

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def test_half_precision_inputs_keep_an_fp32_state() -> None:
    given = inputs(2, 9, torch.float16)
    o, last = titans_memory(*given, chunk=4)
    assert o.dtype == torch.float16 and last.memory_BHKV.dtype == torch.float32
    expected, expected_last = recurrent(*(tensor.double() for tensor in given), chunk=4)
    assert (o - expected).norm() <= 1e-3 * expected.norm()
    assert (last.memory_BHKV - expected_last.memory_BHKV).norm() <= 1e-5 * expected_last.memory_BHKV.norm()


def test_autocast_does_not_round_the_state() -> None:
    given = inputs(1, 9, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = titans_memory(*given, chunk=4)
    close(found, titans_memory(*given, chunk=4), 0)


def test_compiles_without_graph_breaks() -> None:
    given = [tensor.requires_grad_() for tensor in inputs(1, 5)]
    borders = documents(1, 5)
    compiled = torch.compile(titans_memory, fullgraph=True, backend="aot_eager")
    found, expected = (form(*given, None, borders, chunk=4) for form in (compiled, titans_memory))
    close(found, expected)
    gradients = [torch.autograd.grad(one[0].square().sum(), given) for one in (found, expected)]
    torch.testing.assert_close(*gradients)
