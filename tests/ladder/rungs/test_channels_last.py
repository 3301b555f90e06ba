from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.rungs.channels_last import ChannelsLast
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.point = nn.Conv2d(5, 7, 1)
        self.up = nn.ConvTranspose2d(7, 4, 2, stride=2)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.first(x)
        last: Any = {"memory_format": torch.channels_last}
        self.seen.append((x.is_contiguous(**last), y.is_contiguous(**last)))
        return self.up(self.point(y).relu()) * scale


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 9, 7, generator=generator), torch.randn(1, generator=generator)


def test_output_is_the_same_to_fp32_rounding() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    fast = ChannelsLast().apply(Job.of(model)).finish()
    for seed in range(3):
        seen = fast(*inputs(seed))
        expected = model.double()(*(t.double() for t in inputs(seed)))
        model.float()
        assert relative_error([expected], [seen]) < 1e-6


def test_inputs_are_converted_to_channels_last() -> None:
    job = ChannelsLast().apply(Job.of(Net().eval()))
    job.finish()(*inputs(0))
    assert job.model.model.seen == [(True, True)]


def test_proof_counts_converted_convolutions() -> None:
    job = ChannelsLast().apply(Job.of(Net()))
    assert ChannelsLast().proof(job) == (
        "3 of 3 convolutions are channels-last, 2 of them converted (1 identical in both layouts)"
    )
    nothing = ChannelsLast().apply(Job.of(nn.Linear(2, 2)))
    assert ChannelsLast().proof(nothing) == ""


def test_why_not() -> None:
    assert ChannelsLast().why_not(CPU) == ""
    assert ChannelsLast().why_not(CPU, Job.of(Net())) == ""
    assert ChannelsLast().why_not(CPU, Job.of(nn.Conv2d(4, 4, 1))) == ""
    assert ChannelsLast().why_not(CPU, Job.of(nn.Conv3d(2, 2, 3))) == "the model has no 2-D convolution"
    converted = Net().to(memory_format=torch.channels_last)
    assert "already" in ChannelsLast().why_not(CPU, Job.of(converted))


def test_the_users_model_is_left_alone() -> None:
    model = Net().eval()
    strides = {name: t.stride() for name, t in model.state_dict().items()}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ChannelsLast().apply(Job.of(model)).finish()(*inputs(0))
    assert {name: t.stride() for name, t in model.state_dict().items()} == strides
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.seen == []


def test_nests_inside_another_boundary() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    job = ChannelsLast().apply(Bf16().apply(Job.of(model)))
    seen = job.finish()(*inputs(0))
    assert seen.dtype == torch.float32
    assert relative_error([model(*inputs(0))], [seen]) < 12 * 2**-8


def test_training_keeps_the_parameters() -> None:
    job = Job.of(
        nn.Conv2d(3, 4, 3),
        loss=lambda y, _: y.square().mean(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    named = dict(job.parameters)
    job = ChannelsLast().apply(job)
    assert {id(p) for p in job.model.parameters()} == {id(p) for p in named.values()}
    step = job.finish()
    batch = torch.randn(2, 3, 6, 5)
    losses = [float(step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert len(step.gradients()) == 2


def test_plan_round_trip() -> None:
    assert Plan.parse(str(Plan((ChannelsLast(),)))) == Plan((ChannelsLast(),))


@pytest.mark.gpu
def test_on_cuda_after_bf16() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    expected = model.double()(*(t.double() for t in inputs(0)))
    model.float().cuda()
    plan, job = Plan.parse("bf16 + channels_last").build(Job.of(model), Machine.detect("cuda"))
    seen = job.finish()(*(t.cuda() for t in inputs(0)))
    assert seen.dtype == torch.float32
    # Three layers, each with inputs, weights and outputs rounded to 8 bits.
    assert relative_error([expected.cpu()], [seen.cpu()]) < 12 * 2**-8
    assert all(rung.proof(job) for rung in plan.rungs)
