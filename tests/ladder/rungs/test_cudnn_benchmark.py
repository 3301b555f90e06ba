from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.cudnn_benchmark import CudnnBenchmark
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
GPU = replace(CPU, device="cuda:0")


class Watcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.backends.cudnn.benchmark)
        return self.conv(x)


@pytest.mark.parametrize("before", [False, True])
def test_flag_is_set_during_calls_and_restored(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    model = Watcher()
    weights = model.conv.weight.clone()
    job = CudnnBenchmark().apply(Job.of(model))
    assert CudnnBenchmark().proof(job) == ""
    x = torch.randn(2, 3, 5, 5)
    for _ in range(2):
        assert torch.equal(job.finish()(x), model(x))
    assert torch.backends.cudnn.benchmark is before
    assert job.model.seen == [True, True]
    assert model.seen == [before, before]
    assert torch.equal(model.conv.weight, weights)
    assert CudnnBenchmark().proof(job) == "cudnn.benchmark enabled in 2 call(s), for 1 convolution(s)"


def test_restored_when_the_call_raises() -> None:
    before = torch.backends.cudnn.benchmark
    applied = CudnnBenchmark().apply(Job.of(Watcher())).finish()
    with pytest.raises(RuntimeError):
        applied(torch.randn(2, 9, 5, 5))
    assert torch.backends.cudnn.benchmark is before


def test_on_during_a_training_step() -> None:
    job = Job.of(Watcher(), loss=lambda y, _: y.square().mean(), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    job = CudnnBenchmark().apply(job)
    job.finish()(torch.randn(2, 3, 5, 5))
    assert job.model.seen == [True]
    assert not torch.backends.cudnn.benchmark


def test_why_not() -> None:
    assert "NVIDIA" in CudnnBenchmark().why_not(CPU)
    assert CudnnBenchmark().why_not(GPU) == ""
    assert CudnnBenchmark().why_not(GPU, Job.of(Watcher())) == ""
    assert CudnnBenchmark().why_not(GPU, Job.of(nn.Linear(2, 2))) == "the model has no convolution"
    with pytest.raises(Unavailable):
        Plan.parse("cudnn_benchmark").build(Job.of(Watcher()), CPU)


def test_no_proof_without_a_convolution() -> None:
    job = CudnnBenchmark().apply(Job.of(nn.Linear(2, 2)))
    job.finish()(torch.randn(1, 2))
    assert CudnnBenchmark().proof(job) == ""


def test_plan_round_trip() -> None:
    assert Plan.parse(str(Plan((CudnnBenchmark(),)))) == Plan((CudnnBenchmark(),))


@pytest.mark.gpu
def test_on_cuda() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 7, 5, stride=2)).cuda().eval()
    x = torch.randn(3, 3, 33, 31, device="cuda")
    with torch.no_grad():
        expected = model.double()(x.double())
        model.float()
    plan, job = Plan.parse("cudnn_benchmark").build(Job.of(model), Machine.detect("cuda"))
    seen = job.finish()(x)
    # torch lets convolutions use TF32 by default, in whichever algorithm wins.
    assert relative_error([expected], [seen]) < 1e-3
    assert not torch.backends.cudnn.benchmark
    assert plan.rungs[0].proof(job) == "cudnn.benchmark enabled in 1 call(s), for 2 convolution(s)"
