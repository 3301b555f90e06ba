"""Whose fault it is when an output does not react: the inputs' or the model's."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from redline.errors import WorkloadError
from redline.judging import check_reference
from redline.workload import Inputs, Workload

SEEDS = (10, 11)
FIXED = torch.randn(3, 5)


def check(inputs: Callable[[int], Inputs], model: Callable[[Tensor], Tensor]) -> None:
    workload = Workload(lambda: torch.nn.Identity(), inputs, name="mine")
    check_reference(workload, SEEDS, [model(workload.fresh_inputs(seed, "cpu")) for seed in SEEDS])


def test_inputs_that_ignore_their_seed() -> None:
    with pytest.raises(WorkloadError, match=r"mine: inputs\(10\) and inputs\(11\) are the same"):
        check(lambda seed: FIXED, lambda x: x * 2)


def test_an_empty_batch() -> None:
    with pytest.raises(WorkloadError, match=r"mine: inputs\(10\) holds no element \(a batch of 0\?\)"):
        check(lambda seed: torch.randn(0, 5), lambda x: x * 2)


def test_a_model_that_does_not_listen() -> None:
    with pytest.raises(WorkloadError, match="the output does not react to the input"):
        check(lambda seed: torch.randn(3, 5), lambda x: FIXED)
    check(lambda seed: torch.randn(3, 5), lambda x: x * 2)


@pytest.mark.parametrize("other", [2, 5])
def test_batches_of_other_lengths_are_compared_where_both_are(other: int) -> None:
    def inputs(seed: int) -> Tensor:
        return torch.randn(3 if seed == SEEDS[0] else other, 5)

    with pytest.raises(WorkloadError, match="the output does not react to the input"):
        check(inputs, lambda x: torch.ones_like(x))
    check(inputs, lambda x: x * 2)


def test_what_holds_no_tensor_is_named() -> None:
    with pytest.raises(WorkloadError, match="returned a SimpleNamespace in which no tensor is seen"):
        check(lambda seed: torch.randn(3, 5), lambda x: SimpleNamespace(logits=x))  # pyright: ignore
