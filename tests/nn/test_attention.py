"""Tests grouped-query attention: projection sizes, norms, and the choice of the decode kernel."""

import torch

from redline.nn.attention import GroupedQueryAttention
from redline.nn.rope import RotaryTables


def test_queries_keys_and_values_have_their_own_number_of_heads() -> None:
    attention = GroupedQueryAttention(12, heads=6, key_value_heads=2, head_dim=4, qkv_bias=True)
    assert attention.qkv.weight.shape == ((6 + 2 + 2) * 4, 12) and attention.qkv.bias is not None
    assert attention.out.weight.shape == (12, 6 * 4) and attention.out.bias is None
    assert attention.q_norm is None and attention.k_norm is None
    assert attention(torch.randn(3, 5, 12), RotaryTables(8, 4, 10_000.0)).shape == (3, 5, 12)


def test_norms_make_the_scale_of_queries_and_keys_irrelevant() -> None:
    attention = GroupedQueryAttention(16, heads=2, key_value_heads=1, head_dim=8, norm_eps=1e-12).double()
    x, tables = torch.randn(2, 5, 16, dtype=torch.float64), RotaryTables(8, 8, 10_000.0)
    before = attention(x, tables)
    with torch.no_grad():
        attention.qkv.weight[: 3 * 8] *= 7.0  # two query heads, one key head
    assert torch.allclose(attention(x, tables), before, atol=1e-9)
