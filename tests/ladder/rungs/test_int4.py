from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import PlanError, RungError
from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rewrites.quantize import is_quantized, stored_bytes
from redline.ladder.rungs.int4 import Int4
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class Net(nn.Module):
    """Layers of allowed sizes, one with too few outputs and one whose inputs are no multiple of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 128, bias=False))
        self.odd = nn.Linear(128, 100)
        self.head = nn.Linear(100, 64)

    def forward(self, x: Tensor, *, shift: float = 0.0) -> dict[str, Tensor]:
        return {"y": self.head(self.odd(x + self.body(x))) + shift}


def net(device: str = "cpu") -> Net:
    torch.manual_seed(0)
    return Net().eval().to(device)


def inputs(seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(3, 7, 128, generator=torch.Generator().manual_seed(seed)).to(device)


def nearest(weight: Tensor, group: int) -> Tensor:
    """In fp64, what 16 equal steps from the smallest to the largest value of each group can represent best."""
    values = weight.detach().double().view(weight.shape[0], -1, group)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-300)
    return (low + ((values - low) / step).round() * step).view_as(weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_are_nearest_and_the_product_is_theirs(group: int, device: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(384, 80).to(device)
    with torch.no_grad():
        layer.weight[3, :group] = 0.25  # all values of a group are equal
        layer.weight[4] *= 1e-4
    rung = Int4(group=group, min_features=1)
    model = nn.Sequential(layer)
    job = rung.apply(Job.of(model))
    weight: Any = job.model[0].weight
    taken = weight.dequantize().double()
    best = nearest(layer.weight, group)
    # A step is rounded to bf16, and 15 of them add up.
    ranges = layer.weight.detach().double().view(80, -1, group)
    span = (ranges.amax(-1) - ranges.amin(-1)).repeat_interleave(group, 1)
    limit = span / 30 + 2**-7 * (span + layer.weight.double().abs())
    assert bool(((taken - layer.weight.double()).abs() <= limit).all())
    assert (taken - layer.weight).norm() <= 1.05 * (best - layer.weight).norm()
    x = torch.randn(5, 384, device=device)
    expected = x.bfloat16().double() @ taken.t() + layer.bias.double()
    assert relative_error([expected], [job.finish()(x)]) < 2**-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_keeps_its_form_and_the_users_model_is_left_alone(dtype: torch.dtype, device: str) -> None:
    model = net(device).to(dtype)
    before = deepcopy(model.state_dict())
    x = inputs(0, device).to(dtype)
    plan, job = Plan.parse("int4(group=32)").build(Job.of(model, samples=(x,)), Machine.detect(device))
    found = job.finish()(x, shift=1.0)["y"]
    assert found.dtype == dtype and found.shape == (3, 7, 64)
    assert 1e-3 < relative_error([model(x, shift=1.0)["y"]], [found]) < 0.1
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    (rung,) = plan.rungs
    assert rung.proof(job).startswith("2 of 4 linear layers hold int4 weights (weight only)")
    assert "2 not quantized" in rung.proof(job)
    # A bf16 scale and a bf16 offset for each group of 32: five bits for each weight.
    assert stored_bytes(job.model.body[0].weight) == 128 * 96 * 5 // 8


@pytest.mark.parametrize("device", DEVICES)
def test_under_the_compiler_without_a_graph_break(device: str) -> None:
    model, x = net(device), inputs(0, device)
    job = Int4(group=32).apply(Job.of(model))
    with torch.no_grad():
        compiled = torch.compile(job.model, fullgraph=True)(x)
        assert relative_error([job.model(x)["y"]], [compiled["y"]]) < 2**-7


def test_progressive_leaves_the_layers_that_fail_the_gate() -> None:
    model, x = net(), inputs(0)

    def error(*left: str) -> float:
        job = Int4(group=32, skip=left).apply(Job.of(model))
        return relative_error([model(x)["y"]], [job.finish()(x)["y"]])

    best, other = sorted(("body.0", "body.2"), key=lambda name: error(*({"body.0", "body.2"} - {name})))
    alone, both = error(other), error()
    job = Job.of(model, samples=(x,), gates=(Gate("relative_error", 0.3 * alone + 0.7 * both),))
    resolved = Int4(group=32, progressive=True).resolve(job)
    assert resolved == Int4(group=32, skip=(other,))
    assert not is_quantized(model.body[0].weight) and not is_quantized(model.body[2].weight)
    strict = replace(job, gates=(Gate("relative_error", 1e-7),))
    with pytest.raises(RungError, match=f"only '{best}', the least sensitive of 2 layers, fails a gate"):
        Int4(group=32, progressive=True).resolve(strict)
    assert resolved.proof(resolved.apply(job)).startswith("1 of 4 linear layers")


def test_why_not() -> None:
    volta = replace(CPU, device="cuda:0", name="Volta", capability=(7, 0), ceilings=None)
    assert Int4().why_not(volta) == "Volta has no kernels for int4 (compute capability 8.0 or newer required)"
    assert Int4().why_not(CPU) == ""
    assert "no linear layer" in Int4().why_not(CPU, Job.of(nn.Conv2d(3, 4, 3)))
    assert "none of the 1 linear layers" in Int4().why_not(CPU, Job.of(nn.Linear(96, 96)))
    assert Int4(group=32).why_not(CPU, Job.of(nn.Linear(96, 96))) == ""
    assert "needs sample inputs" in Int4(progressive=True).why_not(CPU, Job.of(net()))
    with pytest.raises(PlanError, match="exclude each other"):
        Plan.parse("int4 + int8")


def test_nan_in_a_weight_is_an_error() -> None:
    model = net()
    with torch.no_grad():
        model.body[0].weight[5, 5] = float("nan")
    with pytest.raises(RungError, match=r"'body\.0' contains NaN"):
        Int4(group=32).apply(Job.of(model))
