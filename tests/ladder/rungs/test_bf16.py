from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.bf16 import Bf16
from redline.machine.machine import Machine

pytestmark = pytest.mark.cpu

CPU = Machine.detect("cpu")
FAST = replace(CPU, hardware_dtypes=("fp32", "bf16"), ceilings=None)


class Net(nn.Module):
    """Two floating inputs, one of integers, a complex buffer, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.linear = nn.Linear(5, 3)
        self.register_buffer("spin", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x + self.embed(tokens)), "tokens": tokens}


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, generator=generator), torch.randint(0, 7, (2,), generator=generator)


def rounded_reference(model: Net, x: Tensor, tokens: Tensor) -> Tensor:
    """The same sum in fp64, from inputs and weights rounded to bf16."""

    def low(t: Tensor) -> Tensor:
        return t.to(torch.bfloat16).double()

    return (low(x) + low(model.embed.weight)[tokens]) @ low(model.linear.weight).T + low(model.linear.bias)


def test_output_comes_back_in_fp32_and_close_to_fp64() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    fast = Bf16().apply(Job.of(model)).finish()
    for seed in range(3):
        x, tokens = inputs(seed)
        output = fast(x, tokens)
        expected = rounded_reference(model, x, tokens)
        assert output["y"].dtype == torch.float32
        assert torch.equal(output["tokens"], tokens)
        # Three roundings to 8 bits of mantissa (the sum, the product, the output), on sums of six terms.
        assert relative_error([expected], [output["y"]]) < 3 * 2**-8


def test_the_users_model_is_left_alone() -> None:
    model = Net().eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    Bf16().apply(Job.of(model)).finish()(*inputs(0))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[k].dtype == v.dtype and torch.equal(after[k], v) for k, v in before.items())


def test_complex_and_integer_buffers_stay_what_they_are() -> None:
    job = Bf16().apply(Job.of(Net()))
    buffers = {name.rpartition(".")[2]: b for name, b in job.model.named_buffers()}
    assert buffers["spin"].dtype == torch.complex64
    assert buffers["steps"].dtype == torch.int64


def test_proof_counts_the_weights() -> None:
    model = Net()
    job = Bf16().apply(Job.of(model))
    assert (
        Bf16().proof(job) == f"{sum(p.numel() for p in model.parameters())} weights converted to bf16, 0 left in fp32"
    )


def test_nothing_to_convert_is_unavailable_and_has_no_proof() -> None:
    converted = Job.of(nn.Linear(3, 3).to(torch.bfloat16))
    assert "already" in Bf16().why_not(FAST, converted)
    assert Bf16().proof(Bf16().apply(converted)) == ""
    assert Bf16().why_not(FAST, Job.of(nn.Linear(3, 3))) == ""


def test_a_machine_without_bf16_says_so() -> None:
    slow = replace(CPU, hardware_dtypes=("fp32",), ceilings=None)
    assert "bf16" in Bf16().why_not(slow)
    with pytest.raises(Unavailable, match="bf16"):
        Plan.parse("bf16").build(Job.of(nn.Linear(3, 3)), slow)


def test_training_keeps_the_parameters_and_learns() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    job = Job.of(model, loss=lambda y, batch: (y**2).mean(), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    named = dict(job.parameters)
    job = Bf16().apply(job)
    assert all(job.parameters[name] is p for name, p in named.items())
    assert {id(p) for p in job.model.parameters()} == {id(p) for p in named.values()}
    step = job.finish()
    batch = torch.randn(8, 4)
    losses = [float(step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {g.dtype for g in step.gradients().values()} == {torch.bfloat16}


def test_plan_round_trip() -> None:
    assert Plan.parse(str(Plan((Bf16(),)))) == Plan((Bf16(),))


@pytest.mark.gpu
def test_on_cuda() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    x, tokens = inputs(0)
    expected = rounded_reference(model, x, tokens)
    machine = Machine.detect("cuda")
    plan, job = Plan.parse("bf16").build(Job.of(model.cuda()), machine)
    seen = job.finish()(x.cuda(), tokens.cuda())["y"].cpu()
    assert seen.dtype == torch.float32
    assert relative_error([expected], [seen]) < 3 * 2**-8
    assert plan.rungs[0].proof(job)
