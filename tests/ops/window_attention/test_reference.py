"""Tests which implementation of window attention a CPU uses, that all agree, and which arguments are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.window_attention import (
    IMPLEMENTATIONS,
    reference,
    sdpa,
    window_attention,
    window_attention_expanded,
)
from redline.ops.window_attention.reference import compact_bias_table, expand_bias_table


def inputs(height: int = 8, width: int = 8, channels: int = 6, heads: int = 2, rows: int = 49) -> tuple[Tensor, Tensor]:
    return torch.randn(1, height, width, 3 * channels), torch.randn(rows, heads)


def ran(monkeypatch: pytest.MonkeyPatch, qkv: Tensor, table: Tensor, implementation: str) -> str:
    """Returns which of the two CPU implementations was called."""
    called: list[str] = []
    for name, module in (("reference", reference), ("sdpa", sdpa)):
        monkeypatch.setattr(module, "window_attention", lambda *_, name=name: called.append(name))
    window_attention(qkv, table, 4, 2, implementation)
    assert len(called) == 1
    return called[0]


def test_auto_on_a_cpu_uses_sdpa_except_to_train_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, table = inputs()
    assert ran(monkeypatch, qkv, table, "auto") == "sdpa"
    assert ran(monkeypatch, qkv.requires_grad_(), table, "auto") == "sdpa"
    assert ran(monkeypatch, qkv, table.requires_grad_(), "auto") == "reference"
    with torch.no_grad():
        assert ran(monkeypatch, qkv, table, "auto") == "sdpa"


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_an_explicit_choice_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert ran(monkeypatch, *inputs(), name) == name


def test_cpu_implementations_agree() -> None:
    qkv, table = inputs()
    outputs = [window_attention(qkv, table, 4, 1, name) for name in ("auto", "reference", "sdpa")]
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)


@pytest.mark.parametrize("window", [1, 4])
def test_compact_inverts_expand(window: int) -> None:
    table = torch.randn((2 * window - 1) ** 2, 3)
    assert torch.equal(compact_bias_table(expand_bias_table(table, window)), table)


@pytest.mark.parametrize("name", ["auto", "reference", "sdpa"])
def test_an_expanded_table_gives_the_same_result(name: str) -> None:
    qkv, table = inputs()
    found = window_attention_expanded(qkv, expand_bias_table(table, 4), 1, name)
    assert torch.equal(found, window_attention(qkv, table, 4, 1, name))
    with pytest.raises(ModelError, match="cannot be split into queries, keys and values of 2 heads"):
        window_attention_expanded(qkv[..., :15], expand_bias_table(table, 4), 1, name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invalid_shapes_are_refused(implementation: str) -> None:
    def refused(qkv: Tensor, table: Tensor, sentence: str, window: int = 4, shift: int = 0) -> None:
        with pytest.raises(ModelError, match=sentence):
            window_attention(qkv, table, window, shift, implementation)

    qkv, table = inputs()
    refused(*inputs(height=10), "10 × 8 tokens cannot be divided into windows of 4 × 4")
    refused(*inputs(width=9), "8 × 9 tokens cannot be divided into windows")
    refused(qkv, table, "cannot be divided into windows of 0", window=0)
    refused(*inputs(rows=48), "table_RH must have 49 rows for windows of 4, not 48")
    refused(*inputs(channels=5), "15 channels cannot be split into queries, keys and values of 2 heads")
    refused(*inputs(heads=0), "of 0 heads")
    refused(qkv, table, "shift must be from 0 to 3 .*, not 4", shift=4)
    refused(qkv, table, ", not -1", shift=-1)
    refused(qkv[0], table, "must be .* not .8, 8, 18.")
    refused(qkv, table.to("meta"), "table_RH is on meta, but qkv_BHW3C is on cpu")
