"""Operators that torch's counter does not know are counted too, and torch's settings are restored."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from redline.ladder.measuring.flops import _visible_attention, _visible_attention_backward, counting_flops


def test_an_encoder_layer_in_inference_is_counted() -> None:
    batch, tokens, width, hidden = 3, 7, 16, 40
    layer = nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True).eval()
    x = torch.randn(batch, tokens, width)
    with torch.no_grad(), counting_flops() as counter:
        layer(x)
    products = batch * tokens * (4 * width**2 + 2 * width * hidden)
    scores = 2 * batch * tokens**2 * width
    assert counter.get_total_flops() == 2 * (products + scores)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("backward", [False, True])
def test_attention_on_a_cpu_is_counted(backward: bool) -> None:
    q, k, v = (torch.randn(2, 3, 9, 8, requires_grad=backward) for _ in range(3))
    with counting_flops() as counter:
        output = F.scaled_dot_product_attention(q, k, v)
        if backward:
            output.sum().backward()
    one_product = 2 * 2 * 3 * 9 * 9 * 8
    assert counter.get_total_flops() == one_product * (2 + 5 * backward)


def test_the_fast_path_comes_back_after_a_failure() -> None:
    with pytest.raises(ValueError, match="broken"), counting_flops():
        raise ValueError("broken")
    assert torch.backends.mha.get_fastpath_enabled()


def test_redline_attention_counts_only_visible_positions() -> None:
    tokens, heads, dim = 7, 3, 8
    q = k = v = torch.randn(tokens, heads, dim)
    lowest = torch.tensor([-2, 0, 0, 1, 2, 2, 5])  # a position below 0 is padding
    near = (1 + 2 + 3) + 3 + 3 + 4 + 2
    one_product = 2 * heads * dim
    assert _visible_attention(q, k, v, lowest) == 2 * one_product * near
    assert _visible_attention_backward(q, k, v, lowest) == 5 * one_product * near
    # With far attention every position from `first` on is seen, near or far.
    everything = tokens * (tokens + 1) // 2
    assert _visible_attention(q, k, v, lowest, q, k, q[:, 0, 0], torch.zeros(tokens)) == 2 * one_product * everything
