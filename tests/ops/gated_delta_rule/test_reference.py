"""Tests the two reference forms of the gated delta rule against each other, and properties of a memory."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.gated_delta_rule import gated_delta_rule, gated_delta_step
from redline.ops.gated_delta_rule.reference import chunked, recurrent

LENGTHS = [(1, 4), (3, 8), (8, 8), (29, 5), (37, 16)]


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Returns q, k, v, g and beta of 2 heads with keys of 5 and values of 3 channels."""
    q, k = (F.normalize(torch.randn(batch, tokens, 2, 5, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(batch, tokens, 2, 3, dtype=dtype)
    return q, k, v, -torch.rand(batch, tokens, 2, dtype=dtype), torch.rand(batch, tokens, 2, dtype=dtype)


def documents(batch: int, tokens: int) -> Tensor:
    return (torch.rand(batch, tokens) < 0.15).cumsum(1).int()


def state(batch: int) -> Tensor:
    return torch.randn(batch, 2, 5, 3, dtype=torch.float64)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).abs().max() <= limit


@pytest.mark.parametrize(("tokens", "chunk"), LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_the_chunked_form_agrees_with_the_recurrent_form(tokens: int, chunk: int, packed: bool, carried: bool) -> None:
    given = (*inputs(3, tokens), state(3) if carried else None, documents(3, tokens) if packed else None)
    close(chunked(*given, chunk=chunk), recurrent(*given))


def test_the_recurrent_form_is_the_equation() -> None:
    q, k, v, g, beta = (tensor[0, :, 0] for tensor in inputs(1, 7))
    S = torch.zeros(5, 3, dtype=torch.float64)
    expected = []
    for t in range(7):
        S = S * g[t].exp()
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        expected.append(S.T @ q[t])
    o, last = recurrent(*(tensor[None, :, None] for tensor in (q, k, v, g, beta)))
    close((o[0, :, 0], last[0, 0]), (torch.stack(expected), S))


def test_a_sequence_may_be_split_anywhere() -> None:
    tokens = 41
    given, borders, before = inputs(2, tokens), documents(2, tokens), state(2)
    whole = chunked(*given, before, borders, chunk=8)
    cuts = sorted(random.sample(range(1, tokens), 4))
    now, outputs = before, []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        # A state belongs to the document of the first token, so a part that starts with another document has none.
        other = borders[:, begin] != borders[:, begin - 1] if begin else torch.zeros(2, dtype=torch.bool)
        now = now.masked_fill(other[:, None, None, None], 0)
        o, now = chunked(*(tensor[:, begin:end] for tensor in given), now, borders[:, begin:end], chunk=8)
        outputs.append(o)
    close((torch.cat(outputs, 1), now), whole)


def test_decoding_continues_from_a_prefill() -> None:
    given = inputs(2, 19)
    whole = chunked(*given, chunk=8)
    o, now = chunked(*(tensor[:, :11] for tensor in given), chunk=8)
    outputs = [o]
    for token in range(11, 19):
        o, now = gated_delta_step(*(tensor[:, token] for tensor in given), now)
        outputs.append(o[:, None])
    close((torch.cat(outputs, 1), now), whole)


def test_packed_documents_agree_with_separate_ones() -> None:
    given, lengths = inputs(1, 40), (3, 1, 22, 14)
    borders = torch.repeat_interleave(torch.tensor([2, 5, 6, 9]), torch.tensor(lengths))[None].int()
    o, last = chunked(*given, None, borders, chunk=8)
    begin = 0
    for length in lengths:
        alone, end = chunked(*(tensor[:, begin : begin + length] for tensor in given), chunk=8)
        close((o[:, begin : begin + length],), (alone,))
        begin += length
    close((last,), (end,))


@pytest.mark.parametrize("position", [0, 7, 8, 20])
def test_is_causal(position: int) -> None:
    given = inputs(2, 23)
    o, _ = chunked(*given, chunk=8)
    for index in range(5):
        other = [tensor.clone() for tensor in given]
        other[index][:, position] *= 0.5
        changed, _ = chunked(*other, chunk=8)
        assert torch.equal(changed[:, :position], o[:, :position])
        # The first token has no previous state to decay.
        assert torch.equal(changed[:, position], o[:, position]) == (position == 0 and index == 3)


@pytest.mark.parametrize("form", [recurrent, lambda *given: chunked(*given, chunk=4)])
def test_passes_gradcheck(form: object) -> None:
    given = [tensor.requires_grad_() for tensor in (*inputs(2, 7), state(2))]
    borders = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [0, 0, 2, 2, 2, 2, 2]])
    assert callable(form)
    assert torch.autograd.gradcheck(lambda *tensors: form(*tensors, borders), given, fast_mode=True)


def test_a_decay_that_underflows_gives_no_nan() -> None:
    q, k, v, g, beta = (tensor.requires_grad_() for tensor in inputs(1, 20, torch.float32))
    o, last = chunked(q, k, v, g * 400, beta, chunk=8)
    gradients = torch.autograd.grad(o.sum() + last.sum(), (q, k, v, g, beta))
    assert all(tensor.isfinite().all() for tensor in (o, last, *gradients))


def test_half_precision_inputs_keep_an_fp32_state() -> None:
    given = inputs(2, 9, torch.float16)
    o, last = gated_delta_rule(*given, chunk=4)
    assert o.dtype == torch.float16 and last.dtype == torch.float32
    expected, expected_last = recurrent(*(tensor.double() for tensor in given))
    assert (o - expected).norm() <= 1e-3 * expected.norm()
    assert (last - expected_last).norm() <= 1e-5 * expected_last.norm()


def test_autocast_does_not_round_the_state() -> None:
    given = inputs(1, 9, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_delta_rule(*given, chunk=4)
    close(found, gated_delta_rule(*given, chunk=4), 0)


def test_compiles_without_graph_breaks() -> None:
    given = [tensor.requires_grad_() for tensor in inputs(1, 5)]
    borders = documents(1, 5)
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend="aot_eager")
    found, expected = (form(*given, None, borders, chunk=4) for form in (compiled, gated_delta_rule))
    close(found, expected)
    close(torch.autograd.grad(found[0].square().sum(), given), torch.autograd.grad(expected[0].square().sum(), given))
