import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.rungs.fp16 import Fp16, find_overflow
from redline.ladder.workload import call
from redline.machine.machine import Machine

pytestmark = pytest.mark.cpu

CPU = Machine.detect("cpu")
FAST = replace(CPU, hardware_dtypes=("fp32", "fp16", "bf16"), ceilings=None)
DEVICE = torch.device("cpu")


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Masked(nn.Module):
    """Has minus infinity in an inner module's output on purpose, in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = Mask()

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(self.linear(x)).softmax(-1)


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.tensor([False, True, False, True]), float("-inf"))


def overflowing() -> nn.Module:
    """In range at the start and the end; beyond it in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scale(1e6), Scale(1e-6), nn.Linear(4, 2)).eval()


def build(model: nn.Module, samples: tuple[Tensor, ...], text: str = "fp16") -> tuple[Plan, Job]:
    return Plan.parse(text).build(Job.of(model, samples), FAST)


def test_output_is_fp32_and_close_to_fp64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    plan, job = build(model, (torch.randn(2, 6),))
    fast = job.finish()
    x = torch.randn(3, 6)
    expected = model.double()(x.double())
    seen = fast(x)
    assert str(plan) == "fp16"
    assert seen.dtype == torch.float32
    # Ten bits of mantissa; two layers with inputs, weights, sums and outputs rounded.
    assert relative_error([expected], [seen]) < 8 * 2**-11


def test_overflow_falls_back_to_bf16_and_names_the_module() -> None:
    with pytest.warns(UserWarning, match=r"falls back to bf16: the output of '1' is not finite"):
        plan, job = build(overflowing(), (torch.randn(2, 4),))
    assert plan == Plan((Bf16(),))
    assert "bf16" in plan.rungs[0].proof(job)
    assert job.precision == "bf16"
    assert bool(torch.isfinite(job.finish()(torch.randn(2, 4))).all())


def test_without_the_check_it_overflows() -> None:
    plan, job = build(overflowing(), (torch.randn(2, 4),), "fp16(check=false)")
    assert str(plan) == "fp16(check=false)"
    assert not bool(torch.isfinite(job.finish()(torch.randn(2, 4))).all())
    assert "not checked" in plan.rungs[0].proof(job)


def test_every_sample_is_checked() -> None:
    model = nn.Sequential(nn.Identity(), Scale(1000.0), nn.Linear(4, 2)).eval()
    quiet, loud = torch.ones(1, 4), torch.full((1, 4), 100.0)
    assert find_overflow(model, (quiet,), DEVICE) == ""
    assert "sample 1" in find_overflow(model, (quiet, loud), DEVICE)


def test_overflow_check_copies_buffers_and_no_weight_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    model[2].weight = model[0].weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[nn.Module] = []
    monkeypatch.setattr(
        "redline.ladder.rungs.fp16.call", lambda copied, sample: (seen.append(copied), call(copied, sample))[1]
    )
    assert find_overflow(model, (torch.randn(8, 4),), DEVICE) == ""
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    full, half = seen
    assert full[0].weight is model[0].weight and full[1].running_mean is not model[1].running_mean
    assert half[0].weight is half[2].weight and half[0].weight.dtype == torch.float16


def test_weight_out_of_range_is_named() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 7e4
    assert "'weight'" in find_overflow(model, (torch.zeros(1, 2),), DEVICE)


def test_largest_fp16_value_is_not_an_overflow() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[65504.0, 0.0], [0.0, -65504.0]]))
    assert find_overflow(model, (torch.ones(1, 2),), DEVICE) == ""


def test_input_out_of_range_is_an_overflow() -> None:
    assert "input of sample 0" in find_overflow(nn.Linear(2, 2), (torch.full((1, 2), 1e5),), DEVICE)
    assert "input of sample 0" in find_overflow(nn.Linear(2, 2), ({"input": torch.full((1, 2), 1e5)},), DEVICE)


def test_infinities_in_fp32_are_not_an_overflow() -> None:
    torch.manual_seed(0)
    assert find_overflow(Masked().eval(), (torch.randn(2, 4),), DEVICE) == ""


def test_no_samples_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RungError, match=r"samples=.*check=false"):
        build(nn.Linear(2, 2), ())


def test_the_check_leaves_model_and_random_state_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sample = torch.ones(2, 3, 5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Fp16().resolve(Job.of(model, (sample,), share=True)) == Fp16()
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(after[k].dtype == v.dtype and torch.equal(after[k], v) for k, v in before.items())
    assert not any(m._forward_hooks for m in model.modules())


def test_the_users_model_is_left_alone() -> None:
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    _, job = build(model, (torch.randn(2, 4),))
    job.finish()(torch.randn(2, 4))
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, before)


def test_proof_and_why_not() -> None:
    plan, job = build(nn.Linear(4, 2), (torch.randn(2, 4), torch.randn(2, 4)))
    proof = plan.rungs[0].proof(job)
    assert proof == "10 weights converted to fp16, 0 left in fp32; nothing overflowed on 2 sample(s)"
    half = Job.of(nn.Linear(4, 2).half())
    assert "already" in Fp16().why_not(FAST, half)
    assert Fp16().proof(Fp16().apply(half)) == ""
    assert "fp16" in Fp16().why_not(replace(CPU, hardware_dtypes=("fp32",), ceilings=None))


def test_training_step() -> None:
    torch.manual_seed(0)
    job = Job.of(
        nn.Linear(4, 2),
        (torch.randn(8, 4),),
        loss=lambda y, batch: (y**2).mean(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    _, job = Plan.parse("fp16").build(job, FAST)
    step = job.finish()
    batch = torch.randn(8, 4)
    losses = [float(step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {g.dtype for g in step.gradients().values()} == {torch.float16}


@pytest.mark.gpu
def test_on_cuda_and_its_fallback() -> None:
    torch.manual_seed(0)
    machine = Machine.detect("cuda")
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 5, 3)).eval()
    x = torch.randn(2, 3, 17, 19)
    expected = model.double()(x.double())
    model.float().cuda()
    plan, job = Plan.parse("fp16").build(Job.of(model, (x.cuda(),)), machine)
    seen = job.finish()(x.cuda()).cpu()
    assert str(plan) == "fp16"
    assert relative_error([expected], [seen]) < 8 * 2**-11
    with pytest.warns(UserWarning, match="falls back to bf16"):
        plan, job = Plan.parse("fp16").build(Job.of(overflowing().cuda(), (torch.randn(2, 4).cuda(),)), machine)
    assert str(plan) == "bf16"
    assert bool(torch.isfinite(job.finish()(torch.randn(2, 4).cuda())).all())
