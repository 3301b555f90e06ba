"""Tests the reference of causal attention against a softmax loop, with rows, documents and windows."""

import torch
from torch.nn import functional as F

from redline.ops.causal_attention import Far, causal_attention


def test_is_softmax_over_a_span() -> None:
    q, k, v = (torch.randn(17, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
    lowest = torch.tensor([0, 0, 1, 1, 4, 4, 4, 4, 8, 9, 10, 10, 10, 11, 11, 11, 16])
    found = causal_attention(q, k, v, lowest)
    for token in range(17):
        seen = slice(int(lowest[token]), token + 1)
        for head in range(4):
            shares = (k[seen, head // 2] @ q[token, head] / 6**0.5).softmax(0)
            torch.testing.assert_close(found[token, head], shares @ v[seen, head // 2])


def test_far_keys_share_the_softmax() -> None:
    q, k, v, far_q, far_k = (torch.randn(17, heads, 6, dtype=torch.float64) for heads in (4, 2, 2, 4, 2))
    bias, first = torch.randn(17, dtype=torch.float64), torch.arange(17) // 9 * 9
    lowest = torch.maximum(first, torch.arange(17) // 3 * 3 - 3)
    found = causal_attention(q, k, v, lowest, far=Far(far_q, far_k, bias, first))
    for token in range(17):
        near, far = slice(int(lowest[token]), token + 1), slice(int(first[token]), int(lowest[token]))
        for head in range(4):
            ahead = far_k[far, head // 2] @ far_q[token, head] / 6**0.5 + bias[far]
            shares = torch.cat((ahead, k[near, head // 2] @ q[token, head] / 6**0.5)).softmax(0)
            torch.testing.assert_close(found[token, head], shares @ v[first[token] : token + 1, head // 2])


def test_whole_sequences_agree_with_torch() -> None:
    q, k, v = (torch.randn(3, 11, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    wanted = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    found = causal_attention(*(t.flatten(0, 1) for t in (q, k, v)), torch.arange(33) // 11 * 11).view_as(wanted)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_passes_gradcheck() -> None:
    inputs = [torch.randn(7, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    lowest = torch.tensor([0, 0, 1, 3, 3, 4, 6])
    assert torch.autograd.gradcheck(lambda *given: causal_attention(*given, lowest), inputs)
    sizes = (2, 4), (1, 4), (1, 4), (2, 4), (1, 4), ()
    with_far = [torch.randn(7, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    first = torch.tensor([0, 0, 0, 0, 3, 3, 3])
    assert torch.autograd.gradcheck(
        lambda q, k, v, *far: causal_attention(q, k, v, lowest, far=Far(*far, first)), with_far
    )
