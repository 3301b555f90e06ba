import pytest
import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.calibrate import clipping_limits, mse_limit, observe, percentile_limit
from redline.ladder.rewrites.quantize import linear_layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.never = nn.Linear(6, 8)
        self.zeros = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(input=x)
        return self.zeros(torch.zeros_like(hidden)) + hidden.sum()


def test_observe_sees_forms_and_largest_values() -> None:
    job = Job.of(Net(), samples=(torch.full((2, 6), -9.0), torch.randn(3, 6)))
    layers = linear_layers(job.model)
    seen = observe(job, layers)
    assert set(seen) == {"first", "zeros"}
    assert seen["first"].largest == 9.0
    assert (seen["first"].rows, seen["first"].ranks) == (2, {2})
    assert all(not layer._forward_pre_hooks for layer in layers.values())


def test_layers_that_cannot_be_calibrated_have_no_limit() -> None:
    job = Job.of(Net(), samples=(torch.randn(3, 6),))
    for method in ("minmax", "percentile", "mse"):
        limits = clipping_limits(job, linear_layers(job.model), method, 99.9)
        assert set(limits) == {"first"}
        assert limits["first"].rank == 2
        assert 0 < limits["first"].value <= float(job.samples[0].abs().max())


class Twice(nn.Module):
    """Calls one layer with inputs of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.once = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(self.shared(x)) + self.shared(x[0])


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
def test_a_layer_called_with_two_ranks_has_no_limit(method: str) -> None:
    job = Job.of(Twice(), samples=(torch.randn(3, 6), torch.randn(5, 6)))
    layers = linear_layers(job.model)
    assert set(clipping_limits(job, layers, method, 99.9)) == {"once"}
    assert observe(job, layers)["shared"].rows == 1


def test_values_of_all_samples_are_counted_together() -> None:
    """99 small values in the first sample, one large value in the second: the 90th percentile is a small one."""
    job = Job.of(nn.Sequential(nn.Linear(1, 1)), samples=(torch.full((99, 1), 0.5), torch.full((1, 1), 8.0)))
    limits = clipping_limits(job, linear_layers(job.model), "percentile", 90.0)
    assert limits["0"].value == pytest.approx(0.5, abs=8 / 4096)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_raises(bad: float) -> None:
    x = torch.randn(3, 6)
    x[1, 2] = bad
    job = Job.of(Net(), samples=(torch.randn(3, 6), x))
    with pytest.raises(RungError, match="'first': its inputs on the samples contain NaN or infinity"):
        clipping_limits(job, linear_layers(job.model), "minmax", 99.9)


def test_hooks_are_removed_when_the_model_raises() -> None:
    job = Job.of(Net(), samples=(torch.randn(3, 5),))
    layers = linear_layers(job.model)
    with pytest.raises(RuntimeError):
        observe(job, layers)
    assert all(not layer._forward_pre_hooks for layer in layers.values())


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.9, 100.0])
def test_percentile_is_that_of_the_values(percentile: float) -> None:
    values = torch.rand(20_001, generator=torch.Generator().manual_seed(1)) * 7
    largest = float(values.max())
    histogram = torch.histc(values, 4096, 0, largest).double()
    expected = float(torch.quantile(values.double(), percentile / 100))
    # One bin wide, which is all that a histogram can tell.
    assert abs(percentile_limit(histogram, largest, percentile) - expected) <= 2 * largest / 4096


def test_mse_clips_an_outlier_and_beats_minmax() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(2)).abs()
    values[0] = 100.0
    largest = float(values.max())
    limit = mse_limit(torch.histc(values, 4096, 0, largest).double(), largest)

    def error(limit: float) -> float:
        scale = limit / 127
        return float((((values / scale).round().clamp(max=127) * scale - values) ** 2).mean())

    assert limit < largest
    assert error(limit) < error(largest)
    grid = [largest * k / 100 for k in range(10, 101)]
    assert error(limit) <= 1.01 * min(map(error, grid))


def test_mse_keeps_the_range_of_even_values() -> None:
    values = torch.linspace(0, 3, 10_000)
    assert mse_limit(torch.histc(values, 4096, 0, 3).double(), 3.0) > 2.9
