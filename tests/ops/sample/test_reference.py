"""Tests the reference of sampling against the softmax, and rows that are not finite."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.sample import sample


def test_draws_follow_the_softmax_and_differ_by_key_and_position() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0]).expand(4000, -1)
    keys, heat = torch.arange(4000), torch.full((4000,), 0.8)
    draws = torch.cat([sample(logits, heat, keys, torch.full((4000,), position)) for position in range(5)])
    found = draws.bincount(minlength=6) / len(draws)
    # 20,000 draws: a standard deviation is 0.0035 at the most.
    assert (found - (logits[0] / 0.8).softmax(0)).abs().max() < 0.015
    assert not torch.equal(draws[:4000], draws[4000:8000])


def test_a_temperature_of_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(3, 50)
    zeros = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(sample(logits, torch.zeros(3), zeros, zeros), logits.argmax(1))


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = torch.randn(5, 40)
    logits[0, 17], logits[1, 5], logits[2], logits[3, 1:] = float("nan"), float("inf"), float("-inf"), float("-inf")
    for heat in (0.0, 1.0):
        zeros = torch.zeros(5, dtype=torch.int64)
        assert sample(logits, torch.full((5,), heat), zeros, zeros).tolist()[:4] == [-1, -1, -1, 0]


def test_invalid_arguments_are_refused() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ModelError, match="at least one column"):
        sample(torch.zeros(2, 0), torch.zeros(2), zeros, zeros)
    with pytest.raises(ModelError, match="requires grad"):
        sample(torch.zeros(2, 3, requires_grad=True), torch.zeros(2), zeros, zeros)
