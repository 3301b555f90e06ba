"""The fused attention that takes the place of a hand-written one, and what is noted of a call."""

import math

import pytest
import torch
from torch import Tensor

from redline.ladder.rewrites.attention import Site, _attention_call, attend, attend_in_fp32, fused_attention_in_fp32

MINUS_INFINITY = float("-inf")


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, blocked: Tensor | None, fill: float) -> Tensor:
    scores = q @ k.mT * 0.5 + (0 if bias is None else bias)
    return (scores if blocked is None else scores.masked_fill(blocked, fill)).softmax(-1) @ v


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3), (2, 2, 2, 3)], ids=str)
@pytest.mark.parametrize(("biased", "fill"), [(False, 0.0), (True, 0.0), (False, MINUS_INFINITY), (True, -1e9)])
def test_any_number_of_batch_dimensions_and_any_mask(batch: tuple[int, ...], biased: bool, fill: float) -> None:
    if not batch:
        batch = (1, 1)
    q, k, v = (torch.randn(*batch, length, 8, dtype=torch.float64) for length in (5, 7, 7))
    bias = torch.randn(5, 7, dtype=torch.float64) if biased else None
    blocked = torch.arange(35).view(5, 7) % 3 == 0 if fill else None
    found = attend(q, k, v, bias, blocked, fill, scale=0.5)
    torch.testing.assert_close(found, written_out(q, k, v, bias, blocked, fill))


def test_shapes_are_broadcast() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(1, 3, 7, 8), torch.randn(2, 1, 7, 8)
    torch.testing.assert_close(attend(q, k, v, scale=0.5), written_out(q, k, v, None, None, 0.0))
    torch.testing.assert_close(attend(q, q, v[:, :, :5], scale=0.5), written_out(q, q, v[:, :, :5], None, None, 0.0))


def test_the_causal_flag_counts_only_for_as_many_queries_as_keys() -> None:
    q = k = v = torch.randn(1, 2, 5, 8)
    blocked = torch.ones(5, 5).triu(1).bool()
    expected = written_out(q, k, v, None, blocked, MINUS_INFINITY)
    torch.testing.assert_close(attend(q, k, v, None, blocked, scale=0.5, causal=True), expected)
    torch.testing.assert_close(
        attend(q[:, :, -2:], k, v, None, blocked[-2:], scale=0.5, causal=True), expected[:, :, -2:]
    )


def test_a_scale_may_be_a_tensor_and_a_row_that_sees_nothing_keeps_even_weights() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    torch.testing.assert_close(attend(q, k, v, scale=torch.tensor(0.5)), attend(q, k, v, scale=0.5))
    everything = torch.ones(5, 5).bool()
    torch.testing.assert_close(attend(q, k, v, None, everything, -1e9), v.mean(2, keepdim=True).expand_as(v))


def test_fp32_inside_and_the_values_dtype_outside() -> None:
    q, k, v = (torch.full((1, 1, 2, 4), 300.0, dtype=torch.float16) for _ in range(3))
    for found in (attend_in_fp32(q, k, v), fused_attention_in_fp32(q, k, v, attn_mask=torch.zeros(2, 2).half())):
        assert found.dtype == torch.float16 and torch.equal(found, v)
    boolean = fused_attention_in_fp32(q, k, v, attn_mask=torch.eye(2).bool())
    assert torch.equal(boolean, v)


@pytest.mark.parametrize(("softmaxes", "products", "handwritten"), [(1, 2, True), (0, 2, False), (1, 1, False)])
def test_attention_by_hand_is_a_softmax_between_two_products(softmaxes: int, products: int, handwritten: bool) -> None:
    assert Site((), {}, softmaxes, products).handwritten is handwritten


def test_a_call_is_noted_with_its_mask() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    plain, masked = _attention_call(q, k, k), _attention_call(q, k, k, torch.ones(5, 7).bool(), 0.1, is_causal=True)
    added = _attention_call(q, k, k, torch.ones(5, 7))
    assert plain != masked != added and plain == _attention_call(q.clone(), k, k)
    assert math.isclose(masked.dropout_p, 0.1) and masked.causal and not plain.causal
