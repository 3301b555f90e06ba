"""Tests the reference of linear cross-entropy against PyTorch, and which arguments are refused."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import ModelError
from redline.ops.linear_cross_entropy import linear_cross_entropy, reference


def inputs(rows: int, features: int, classes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    floats = [torch.randn(shape, dtype=dtype) for shape in ((rows, features), (classes, features), (classes,))]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in floats)
    return [hidden, weight, torch.randint(classes, (rows,)), bias]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_agrees_with_torch(reduction: str, with_bias: bool) -> None:
    hidden, weight, target, bias = inputs(7, 5, 23)
    target[2] = -100
    bias, parameters = (bias, (hidden, weight, bias)) if with_bias else (None, (hidden, weight))
    found = linear_cross_entropy(hidden, weight, target, bias, label_smoothing=0.1, reduction=reduction)
    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits, target, label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)
    )


def test_passes_gradcheck() -> None:
    hidden, weight, target, bias = inputs(4, 3, 6)
    whole = partial(reference.linear_cross_entropy, target_N=target, z_loss=0.1)
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: whole(hidden, weight, bias_V=bias), (hidden, weight, bias)
    )


def test_autocast_agrees_with_a_linear_layer() -> None:
    hidden, weight, target, bias = inputs(6, 5, 9, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, target, bias)
        logits = F.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16 and found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), target))
    assert torch.autograd.grad(found, weight)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_ND": torch.zeros(3, 4)}, r"weight_VD must have shape \(V, 4\), not \(7, 5\)"),
        ({"hidden_ND": torch.zeros(3)}, r"hidden_ND must have shape \(N, D\), not \(3,\)"),
        ({"weight_VD": torch.zeros(0, 5)}, r"weight_VD must have at least one class, not \(0, 5\)"),
        ({"weight_VD": torch.zeros(7, 5, dtype=torch.float64)}, "weight_VD is torch.float64, but hidden_ND"),
        ({"weight_VD": torch.zeros(7, 5, device="meta")}, "weight_VD is on meta"),
        ({"bias_V": torch.zeros(6)}, r"bias_V must have shape \(7,\)"),
        ({"target_N": torch.zeros(2, dtype=torch.int64)}, r"target_N must have shape \(3,\)"),
        ({"target_N": torch.full((3,), 7)}, "target 7 is not one of 7 classes"),
        ({"reduction": "max"}, "unknown reduction 'max'"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, object], sentence: str) -> None:
    target = torch.zeros(3, dtype=torch.int64)
    given = {"hidden_ND": torch.zeros(3, 5), "weight_VD": torch.zeros(7, 5), "target_N": target} | changed
    with pytest.raises(ModelError, match=sentence):
        linear_cross_entropy(**given)


def test_the_reference_compiles_under_autocast() -> None:
    hidden, weight, target, bias = inputs(6, 5, 9, torch.float32)

    def head(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(hidden, weight, target, bias)

    whole = torch.compile(head, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(hidden), head(hidden))
