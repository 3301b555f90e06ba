"""Forms of attention written by hand: each is found and replaced by an equal call, or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from redline.ladder.rewrites.attention import attend
from redline.ladder.rewrites.attention_match import NoMatch, insert_attend, match, softmaxes

INF = float("inf")
Q, K, V = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6)
# In every row some keys are blocked and some are not.
MASK = torch.arange(35).view(5, 7) % 3 == 0
BIAS = torch.randn(3, 5, 7)
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]

EQUAL: dict[str, Form] = {
    "transpose": lambda q, k, v, m, b: (q @ k.transpose(-2, -1)).softmax(-1) @ v,
    "transpose, the other way": lambda q, k, v, m, b: (q @ k.transpose(-1, -2)).softmax(-1) @ v,
    "mT": lambda q, k, v, m, b: torch.matmul(q, k.mT).softmax(dim=-1).matmul(v),
    "permute": lambda q, k, v, m, b: (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v,
    "permute of a tuple": lambda q, k, v, m, b: (q @ k.permute((0, 1, -1, -2))).softmax(-1) @ v,
    "keys that lie transposed": lambda q, k, v, m, b: (q @ k.mT.contiguous()).softmax(-1) @ v,
    "scaled": lambda q, k, v, m, b: (q @ k.mT * 0.3).softmax(-1) @ v,
    "scaled from the left": lambda q, k, v, m, b: (0.3 * (q @ k.mT)).softmax(-1) @ v,
    "divided": lambda q, k, v, m, b: (q @ k.mT / 8**0.5).softmax(-1) @ v,
    "scaled and divided": lambda q, k, v, m, b: (2 * (q @ k.mT) / 3 * 0.5).softmax(-1) @ v,
    "scaled by a tensor": lambda q, k, v, m, b: (q @ k.mT * b[0, 0, 0] / 2).softmax(-1) @ v,
    "biased": lambda q, k, v, m, b: (q @ k.mT + b).softmax(-1) @ v,
    "biased from the left": lambda q, k, v, m, b: (b + q @ k.mT).softmax(-1) @ v,
    "biased twice": lambda q, k, v, m, b: (q @ k.mT + b + 2 * b).softmax(-1) @ v,
    "filled": lambda q, k, v, m, b: (q @ k.mT).masked_fill(m, -INF).softmax(-1) @ v,
    "filled with a low number": lambda q, k, v, m, b: (q @ k.mT + b).masked_fill(m, -1e8).softmax(-1) @ v,
    "filled twice": lambda q, k, v, m, b: (q @ k.mT).masked_fill(m, -1e9).masked_fill(b > 1, -1e9).softmax(-1) @ v,
    "where": lambda q, k, v, m, b: torch.where(m, -INF, q @ k.mT).softmax(-1) @ v,
    "where not": lambda q, k, v, m, b: torch.where(m, q @ k.mT, -INF).softmax(-1) @ v,
    "cast": lambda q, k, v, m, b: (q @ k.mT).float().softmax(-1).to(v.dtype) @ v,
    "no dropout": lambda q, k, v, m, b: F.dropout((q @ k.mT).softmax(-1), 0.5, False) @ v,
    "values first": lambda q, k, v, m, b: v.mT @ (q @ k.mT).softmax(-1).mT,
    "einsum": lambda q, k, v, m, b: torch.einsum(
        "bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "einsum, other names": lambda q, k, v, m, b: torch.einsum(
        "wxyz,wxzk->wykx", torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1), v
    ),
    "einsum, values first": lambda q, k, v, m, b: torch.einsum(
        "bhje,bhij->bihe", v, (torch.einsum("bhid,bhjd->bhij", q, k) * 0.5 + b).softmax(-1)
    ),
}
REFUSED: dict[str, tuple[Form, str]] = {
    "no product": (lambda q, k, v, m, b: (q + 1).softmax(-1), "not over a product"),
    "weights returned": (lambda q, k, v, m, b: ((w := (q @ k.mT).softmax(-1)) @ v, w), "weights are used elsewhere"),
    "scores returned": (lambda q, k, v, m, b: ((s := q @ k.mT).softmax(-1) @ v, s), "scores are used elsewhere"),
    "product returned": (
        lambda q, k, v, m, b: ((s := q @ k.mT).mul(2).softmax(-1) @ v, s),
        "scores are used elsewhere",
    ),
    "masked, then scaled": (lambda q, k, v, m, b: ((q @ k.mT + b) * 2).softmax(-1) @ v, "scaled after masking"),
    "filled, then scaled": (
        lambda q, k, v, m, b: (q @ k.mT).masked_fill(m, -INF).div(2).softmax(-1) @ v,
        "scaled after masking",
    ),
    "a number added": (lambda q, k, v, m, b: (q @ k.mT + 1).softmax(-1) @ v, "a number is added"),
    "weak fill": (lambda q, k, v, m, b: (q @ k.mT).masked_fill(m, -9e7).softmax(-1) @ v, "filled with -9e\\+07"),
    "computed fill": (
        lambda q, k, v, m, b: torch.where(m, q @ k.mT, b.min()).softmax(-1) @ v,
        "fill value is not a constant",
    ),
    "two fills": (
        lambda q, k, v, m, b: (q @ k.mT).masked_fill(m, -INF).masked_fill(b > 1, -1e9).softmax(-1) @ v,
        "filled with different values",
    ),
    "computed dropout": (
        lambda q, k, v, m, b: F.dropout((q @ k.mT).softmax(-1), b[0, 0, 0]) @ v,
        "its dropout probability is not a constant",
    ),
    "weights changed": (lambda q, k, v, m, b: (q @ k.mT).softmax(-1).mul(2) @ v, "are not directly multiplied"),
    "weights on the right": (lambda q, k, v, m, b: v.mT @ (q @ k.mT).softmax(-1), "are not directly multiplied"),
    "einsum and matmul": (
        lambda q, k, v, m, b: torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1) @ v,
        "mixes einsum with other products",
    ),
    "matmul and einsum": (
        lambda q, k, v, m, b: torch.einsum("bhij,bhje->bhie", (q @ k.mT).softmax(-1), v),
        "mixes einsum with other products",
    ),
    "einsum with dots": (
        lambda q, k, v, m, b: torch.einsum("...ij,...je->...ie", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
        "mixes einsum with other products",
    ),
    "einsum over heads": (
        lambda q, k, v, m, b: torch.einsum("bhij,bhje->bie", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
        "its einsum",
    ),
}


def traced(form: Form) -> tuple[fx.GraphModule, fx.Node]:
    module = fx.symbolic_trace(form)
    (softmax,) = softmaxes(module.graph, {})
    return module, softmax


@pytest.mark.parametrize("name", EQUAL)
def test_supported_forms_become_one_equal_call(name: str) -> None:
    module, softmax = traced(EQUAL[name])
    expected = module(Q, K, V, MASK, BIAS)
    found = match(softmax, {})
    call = insert_attend(module.graph, found, causal=False, dropout_p=found.dropout_p)
    module.graph.lint()
    module.recompile()
    assert call.target is attend and not softmaxes(module.graph, {}) and found.dropout_p == 0
    torch.testing.assert_close(module(Q, K, V, MASK, BIAS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_forms_raise_with_a_reason(name: str) -> None:
    form, reason = REFUSED[name]
    _, softmax = traced(form)
    with pytest.raises(NoMatch, match=reason):
        match(softmax, {})


@pytest.mark.parametrize(
    ("form", "chance"),
    [
        (lambda q, k, v, m, b: F.dropout((q @ k.mT).softmax(-1)) @ v, 0.5),
        (lambda q, k, v, m, b: F.dropout((q @ k.mT).softmax(-1), p=0.25, training=True) @ v, 0.25),
    ],
)
def test_dropout_on_the_weights_is_found(form: Form, chance: float) -> None:
    _, softmax = traced(form)
    found = match(softmax, {})
    assert found.dropout_p == chance and found.dropout is not None
