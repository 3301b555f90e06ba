import torch
from torch import nn

from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.rewrites.quantize import linear_layers
from redline.ladder.rewrites.sensitivity import least_sensitive_first, longest_passing, quantized

NOISE = {"0": 0.10, "1": 0.001, "2": 0.02}


def spoil(name: str, layer: nn.Linear) -> None:
    """Stands in for quantizing: a known harm per layer."""
    layer.weight = nn.Parameter(layer.weight * (1 + NOISE[name]))


def job(limit: float) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    return Job.of(model, samples=(torch.randn(4, 8),), gates=(Gate("relative_error", limit),))


def test_order_follows_the_measured_error() -> None:
    one = job(1.0)
    layers = linear_layers(one.model)
    before = {name: layer.weight for name, layer in layers.items()}
    assert least_sensitive_first(one, layers, spoil) == ["1", "2", "0"]
    assert all(layers[name].weight is weight for name, weight in before.items())


def test_count_is_the_largest_that_passes() -> None:
    # Scaling a linear chain multiplies: 0.1%, then 2.1%, then 12.3% of relative error.
    for limit, expected in ((0.0005, 0), (0.01, 1), (0.05, 2), (0.2, 3)):
        one = job(limit)
        assert longest_passing(one, ["1", "2", "0"], linear_layers(one.model), spoil) == expected


def test_nan_ranks_last() -> None:
    def poison(name: str, layer: nn.Linear) -> None:
        spoil(name, layer)
        if name == "1":
            layer.weight.data.fill_(float("nan"))

    one = job(1.0)
    layers = linear_layers(one.model)
    assert least_sensitive_first(one, layers, poison) == ["2", "0", "1"]
    assert longest_passing(one, ["2", "0", "1"], layers, poison) == 2


def test_weights_are_restored_if_quantization_raises() -> None:
    one = job(1.0)
    layers = linear_layers(one.model)
    before = {name: layer.weight for name, layer in layers.items()}

    def fail(name: str, layer: nn.Linear) -> None:
        spoil(name, layer)
        if name == "2":
            raise RuntimeError

    try:
        with quantized(layers, fail):
            raise AssertionError("not reached")
    except RuntimeError:
        pass
    assert all(layers[name].weight is weight for name, weight in before.items())
