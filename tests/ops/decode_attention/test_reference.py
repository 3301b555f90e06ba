"""Tests the reference against a softmax over the stored tokens, and which arguments are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.decode_attention import decode_attention

from .decode_examples import example


def test_is_softmax_over_the_last_tokens() -> None:
    ring, heads, groups, dim, steps = 7, 6, 2, 4, 20
    history = [torch.randn(3, steps, count, dim, dtype=torch.float64) for count in (heads, groups, groups)]
    keys, values = (torch.full((3, ring + 2, groups, dim), float("nan"), dtype=torch.float64) for _ in range(2))
    lengths = torch.zeros(3, dtype=torch.long)
    for step in range(steps):
        q, k, v = (tensor[:, step] for tensor in history)
        found = decode_attention(q, k, v, keys, values, lengths, ring)
        lengths += 1
        first = max(0, step + 1 - ring)
        for row in range(3):
            for head in range(heads):
                seen = history[1][row, first : step + 1, head // 3], history[2][row, first : step + 1, head // 3]
                expected = (seen[0] @ q[row, head] / dim**0.5).softmax(0) @ seen[1]
                torch.testing.assert_close(found[row, head], expected)
    assert keys[:, ring:].isnan().all()


def test_invalid_arguments_are_refused() -> None:
    q, k, v, keys, values, lengths = example(8, [3, 9], 4, 2, 6, torch.float32)
    for wrong, words in (
        ((q[0], k, v, keys, values, lengths, 8), r"q_BHD must have shape \(B, H, D\)"),
        ((q[:, :3], k, v, keys, values, lengths, 8), "the 3 query heads must be a multiple of the 2"),
        ((q, k, v[:1], keys, values, lengths, 8), "v_BGD must have shape"),
        ((q, k, v, keys, values, lengths, 14), "ring must be from 1 to .*, not 14"),
        ((q, k, v, keys, values, lengths, 0), "ring must be from 1 to .*, not 0"),
        ((q.half(), k, v, keys, values, lengths, 8), "k_BGD is torch.float32, but q_BHD is torch.float16"),
        ((q, k, v, keys, values, lengths.float(), 8), "lengths_B must be an integer tensor"),
        ((q, k, v, keys, values.clone().transpose(1, 3).contiguous().transpose(1, 3), lengths, 8), "equal strides"),
    ):
        with pytest.raises(ModelError, match=words):
            decode_attention(*wrong)
