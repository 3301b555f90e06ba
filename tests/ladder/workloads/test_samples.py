"""Batches made from the user's samples: themselves first, then variations of the same shape, dtype and range."""

import pytest
import torch

from redline.errors import WorkloadError
from redline.ladder.workloads.samples import SampleInputs, random_like


@pytest.mark.parametrize("offset", [-1000.0, 0.0, 1000.0])
def test_a_variation_has_the_mean_range_and_spread_of_its_sample(offset: float) -> None:
    torch.manual_seed(0)
    sample = offset + torch.rand(64, 50)
    varied = random_like(sample)
    assert varied.shape == sample.shape and varied.dtype == sample.dtype
    assert sample.min() <= varied.min() and varied.max() <= sample.max()
    assert abs(varied.mean() - sample.mean()) < 0.1 and 0.2 < varied.std() < 0.4
    # Each example is scaled and shifted by its own numbers, and no value stays where it was.
    assert varied.mean(1).std() > 0.05 and (varied != sample).float().mean() > 0.5


def test_integers_are_permuted_and_positions_and_masks_stay() -> None:
    tokens = torch.tensor([[7, 3, 5, 1, 9, 2]])
    assert sorted(random_like(tokens).flatten().tolist()) == sorted(tokens.flatten().tolist())
    for fixed in (torch.arange(6)[None], torch.tensor([[1, 1, 0]]), torch.ones(2, 3)):
        assert torch.equal(random_like(fixed), fixed)


def test_the_first_batches_are_the_samples_and_the_final_race_sees_none_of_them() -> None:
    samples = [torch.randn(2, 3), torch.randn(2, 3)]
    inputs = SampleInputs(samples)
    for seed in (0, 1, 10, 11, 100, 101):
        assert torch.equal(inputs(seed), samples[seed % 2])
    for seed in (2, 12, 20, 21):
        assert not any(torch.equal(inputs(seed), sample) for sample in samples)


def test_constant_samples_are_refused() -> None:
    with pytest.raises(WorkloadError, match="every tensor in samples= is constant, a mask or empty"):
        SampleInputs([torch.ones(2, 3)])
    with pytest.raises(WorkloadError, match="samples= holds no tensor"):
        SampleInputs([])
