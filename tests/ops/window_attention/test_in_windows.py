"""Tests that attention of tokens in window order agrees with attention of the image."""

import pytest
import torch

from redline.ops.window_attention.in_windows import attention_in_windows, image_order, reordering, window_order
from redline.ops.window_attention.reference import relative_bias, window_attention

WINDOW = 4


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("picture", [(2, 8, 12), (1, 4, 4), (3, 4, 12), (1, 12, 4)])
def test_agrees_with_the_reference(picture: tuple[int, int, int], shift: int) -> None:
    heads, size = 3, 5
    qkv = torch.randn(*picture, 3 * heads * size, dtype=torch.float64)
    table = torch.randn((2 * WINDOW - 1) ** 2, heads, dtype=torch.float64)
    rows = qkv.flatten(0, 2)[window_order(*picture, WINDOW, shift)]
    found = attention_in_windows(rows, relative_bias(table, WINDOW), picture, shift)
    found = found[image_order(*picture, WINDOW, shift)].view(*picture, -1)
    torch.testing.assert_close(found, window_attention(qkv, table, WINDOW, shift), atol=1e-12, rtol=1e-12)


def test_orders_convert_into_each_other() -> None:
    sizes = (2, 8, 12, WINDOW)
    tokens = torch.randn(2 * 8 * 12)
    plain, shifted = tokens[window_order(*sizes, 0)], tokens[window_order(*sizes, 2)]
    assert torch.equal(plain[reordering(*sizes, 0, 2)], shifted) and not torch.equal(plain, shifted)
    assert torch.equal(shifted[reordering(*sizes, 2, 0)], plain)
