"""A form describes a call as JSON, checks other calls, and rebuilds outputs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.errors import ModelError
from redline.ladder.exports.call_form import describe, describe_call, restore, tensor_forms, tensors_of_call

X, Y = torch.zeros(2, 3), torch.ones(4, dtype=torch.int64)


def test_nested_outputs_are_rebuilt() -> None:
    value = {"a": (X, [Y, None]), "b": 0.5}
    form = json.loads(json.dumps(describe(value, "output")))
    made = restore(form, [X, Y])
    assert made["a"][0] is X and made["a"][1][0] is Y and made["a"][1][1] is None and made["b"] == 0.5
    assert isinstance(made["a"], tuple) and [leaf["dtype"] for leaf in tensor_forms(form)] == ["float32", "int64"]


def test_tensors_come_in_the_order_of_the_form() -> None:
    form = describe_call((), {"x": X, "mask": Y, "scale": 2})
    mask, x = tensors_of_call(form, (), {"scale": 2, "mask": Y, "x": X})
    assert mask is Y and x is X


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ((X,), {}, "kwargs: the artifact takes the names scale, not none"),
        (
            (X.double(),),
            {"scale": 2},
            r"args\[0\] is a tensor of shape \(2, 3\) in float64, but the artifact takes .*32",
        ),
        ((X, X), {"scale": 2}, "args: the artifact takes 1 values, not 2"),
        (("x",), {"scale": 2}, r"args\[0\] is a str, but the artifact takes a tensor there"),
        ((X,), {"scale": 3}, "scale is a int, but 2 is fixed in the artifact"),
    ],
)
def test_other_calls_are_refused(args: Any, kwargs: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        tensors_of_call(describe_call((X,), {"scale": 2}), args, kwargs)


def test_objects_cannot_be_rebuilt() -> None:
    with pytest.raises(ModelError, match="the output contains a SimpleNamespace"):
        describe(SimpleNamespace(x=X), "output")
    assert describe([SimpleNamespace()], "output", strict=False) == {"list": [{"object": "SimpleNamespace"}]}
