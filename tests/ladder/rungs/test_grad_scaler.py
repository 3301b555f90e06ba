import copy
import tomllib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import PlanError, RungError
from redline.ladder.job import Job, TrainingStep
from redline.ladder.plan import Plan
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rungs.autocast import Autocast
from redline.ladder.rungs.fp16 import Fp16
from redline.ladder.rungs.grad_scaler import AdaptiveGradScaler, GradScaler
from redline.machine.machine import Machine


class Gain(nn.Module):
    """Multiplies; a large gain makes the gradients overflow fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.register_buffer("offset", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.offset


def summed(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def fp16_job(rung: GradScaler, model: nn.Module | None = None) -> Job:
    job = Job.of(model or Gain(), loss=summed, optimizer=momentum)
    return rung.apply(Fp16(check=False).apply(job))


def weights(job: Job) -> list[Tensor]:
    return [p.detach().clone() for p in job.parameters.values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_fp32_steps_equal_unscaled_steps() -> None:
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 2))
    twin = copy.deepcopy(model)
    plain, scaled = momentum(twin.parameters()), momentum(model.parameters())
    scaler = AdaptiveGradScaler(model, GradScaler(init_scale=4096.0, growth_interval=2))
    for _ in range(5):
        x = torch.randn(4, 7)
        plain.zero_grad()
        twin(x).square().mean().backward()
        plain.step()
        scaled.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(scaled)
        # A power of two moves only the exponent, so even the gradients left behind are bit for bit the same.
        for expected, seen in zip(twin.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None and seen.grad is not None
            assert torch.equal(expected.grad, seen.grad) and expected.grad.abs().sum() > 0
            assert torch.equal(expected, seen)
        scaler.update()
    assert scaler.current == 4096 * 4 and scaler.skipped == 0


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    rung = GradScaler(init_scale=4096.0)
    job = fp16_job(rung)
    step = job.finish()
    calm, wild = torch.ones(2, 3), torch.full((2, 3), 1000.0)
    before = weights(job)
    step(wild)  # gradient 2,000 times 4,096 is beyond 65,504
    assert same(weights(job), before)
    assert step.scaler.current == 2048.0 and step.scaler.skipped == 1
    step(calm)
    assert not same(weights(job), before)
    assert step.scaler.current == 2048.0
    gradient = job.parameters["inner.weight"].grad
    assert gradient is not None and torch.equal(gradient, torch.full((5, 3), 2.0, dtype=torch.float16))
    assert rung.proof(job) == "loss scaled in 2 steps, 1 skipped after an overflow; scale 2048, initially 4096"


def test_nan_gradients_are_skipped_too() -> None:
    job = fp16_job(GradScaler(switch_after=0))
    step = job.finish()
    before = weights(job)
    step(torch.full((2, 3), float("nan")))
    assert same(weights(job), before)


def test_small_gradients_survive_the_backward_pass() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight) * 1e-5 * 1e-3

    def gradient(plan: list[Any]) -> Tensor:
        job = Job.of(Deep(), loss=summed, optimizer=momentum)
        for rung in plan:
            job = rung.apply(job)
        job.finish()(torch.full((1, 4), 256.0))
        found = job.parameters["weight"].grad
        assert found is not None
        return found.float()

    exact = 256e-8
    assert gradient([Fp16(check=False)]).abs().max() == 0
    kept = gradient([Fp16(check=False), GradScaler()])
    assert ((kept - exact).abs() < 2**-24).all() and (kept > 0).all()  # fp16's smallest step, once divided


def test_scale_grows_only_after_growth_interval() -> None:
    job = fp16_job(GradScaler(init_scale=64.0, growth_interval=3))
    step = job.finish()
    scales = []
    for x in (1.0, 1.0, 1000.0, 1.0, 1.0, 1.0, 1.0):
        step(torch.full((2, 3), x))
        scales.append(step.scaler.current)
    assert scales == [64, 64, 32, 32, 32, 64, 64]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_repeated_overflow_switches_to_bf16_once_and_trains_on(steps_before: int) -> None:
    rung = GradScaler(init_scale=4096.0, switch_after=3)
    job = fp16_job(rung)
    objects = list(job.model.parameters())
    step = job.finish()
    for _ in range(steps_before):
        step(torch.ones(2, 3))
    assert all(s["momentum_buffer"].dtype == torch.float16 for s in step.optimizer.state.values())
    wild = torch.full((2, 3), 60000.0)
    step(wild)
    step(wild)
    assert all(p.dtype == torch.float16 for p in job.model.parameters())
    before = [w.to(torch.bfloat16) for w in weights(job)]
    with pytest.warns(UserWarning, match="3 steps in a row overflowed"):
        step(wild)
    assert all(p.dtype == torch.bfloat16 for p in job.model.parameters())
    assert all(b.dtype == torch.bfloat16 for b in job.model.buffers())
    assert all(a is b for a, b in zip(job.model.parameters(), objects, strict=True))
    assert isinstance(job.model, Boundary) and job.model.dtype == torch.bfloat16
    assert same(weights(job), before)
    momenta = [s["momentum_buffer"] for s in step.optimizer.state.values()]
    assert len(momenta) == (2 if steps_before else 0) and all(m.dtype == torch.bfloat16 for m in momenta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = step(wild)
    assert torch.isfinite(loss) and loss.dtype == torch.float32
    assert not same(weights(job), before)
    gradient = job.parameters["inner.weight"].grad
    assert gradient is not None and torch.equal(gradient.float(), torch.full((5, 3), 120000.0).bfloat16().float())
    assert "switched to bf16 after 3 overflows" in rung.proof(job)


def test_overflows_that_are_not_consecutive_do_not_switch() -> None:
    job = fp16_job(GradScaler(switch_after=2))
    step = job.finish()
    for x in (1000.0, 1.0, 1000.0, 1.0):
        step(torch.full((2, 3), x))
    assert not step.scaler.switched


def test_switch_changes_the_dtype_of_autocast() -> None:
    rung = GradScaler(init_scale=2.0**20, switch_after=1)
    job = Autocast("fp16").apply(Job.of(Gain(), loss=summed, optimizer=momentum))
    assert rung.why_not(Machine.detect("cpu"), job) == ""
    job = rung.apply(job)
    step = job.finish()
    with pytest.warns(UserWarning, match="converted to bf16"):
        step(torch.full((2, 3), 60000.0))
    step(torch.full((2, 3), 60000.0))
    assert all(p.dtype == torch.float32 and p.grad is not None for p in job.model.parameters())
    assert all(torch.isfinite(g).all() for g in step.gradients().values())


def test_why_not_and_the_users_model() -> None:
    machine = Machine.detect("cpu")
    model = Gain()
    before = copy.deepcopy(model.state_dict())
    job = Job.of(model, loss=summed, optimizer=momentum)
    assert "fp32" in GradScaler().why_not(machine, job)
    job = fp16_job(GradScaler(), model)
    assert GradScaler().why_not(machine, job) == ""
    assert GradScaler().proof(job) == ""
    job.finish()(torch.ones(2, 3))
    assert GradScaler().proof(job)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_round_trip_and_bad_options() -> None:
    plan = Plan((GradScaler(init_scale=1024.0, growth_interval=100),))
    assert str(plan) == "grad_scaler(init_scale=1024.0, growth_interval=100)"
    assert Plan.parse(str(plan)) == plan == Plan.from_document(tomllib.loads(plan.to_toml()))
    for options in (
        {"init_scale": 0.0},
        {"growth_factor": 0.5},
        {"growth_interval": 0},
        {"backoff": 1.0},
        {"switch_after": -1},
    ):
        with pytest.raises(RungError, match=next(iter(options))):
            GradScaler(**options)
    with pytest.raises(RungError, match="backoff"):
        GradScaler(backoff=0.0)
    assert GradScaler(growth_factor=1.0, growth_interval=1, switch_after=0)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()
    x = torch.randn(32, 64, device="cuda")
    expected = copy.deepcopy(model)
    expected(x).square().mean().backward()
    built, job = Plan.parse("fp16(check=false) + grad_scaler").build(
        Job.of(model, loss=lambda output, batch: output.square().mean(), optimizer=momentum),
        Machine.detect("cuda"),
    )
    step = job.finish()
    step(x)
    assert "0 skipped" in built.rungs[-1].proof(job)
    for name, parameter in expected.named_parameters():
        gradient = step.gradients()[name].float()
        assert parameter.grad is not None
        assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 0.01, name


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_after_they_are_unscaled(scaled: bool) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), 10 * torch.randn(16, 8)

    def squares(output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()

    norms = {}
    for limit in (None, 0.5, 1e6):
        job = replace(Job.of(model, loss=squares, optimizer=momentum), clip_norm=limit)
        if scaled:
            job = replace(job, scaler=lambda _: AdaptiveGradScaler(model, GradScaler(init_scale=1024.0)))
        step = TrainingStep(job)
        step(batch)
        norms[limit] = float(torch.cat([g.flatten() for g in step.gradients().values()]).norm())
    assert norms[None] > 10 and norms[1e6] == pytest.approx(norms[None])
    assert norms[0.5] == pytest.approx(0.5, rel=1e-3)


def test_a_plan_takes_clip_norm() -> None:
    step: Any = Plan().apply(Gain(), loss=summed, optimizer=momentum, clip_norm=0.25)
    step(torch.ones(2, 3))
    assert float(torch.cat([g.flatten() for g in step.gradients().values()]).norm()) == pytest.approx(0.25, rel=1e-3)


def test_the_scale_still_adapts_when_gradients_are_clipped() -> None:
    scaler = AdaptiveGradScaler(nn.Linear(2, 2), GradScaler(init_scale=16.0))
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([float("inf"), 1.0])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.skipped, scaler.current, weight.tolist()) == (1, 8.0, [1.0, 1.0])
    weight.grad = torch.tensor([8.0, 16.0])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, -1.0]


def test_clip_norm_needs_training_and_a_positive_norm() -> None:
    with pytest.raises(PlanError, match="clip_norm=1.0 must be above 0, and needs loss="):
        Plan().apply(nn.Linear(2, 2), clip_norm=1.0)
    with pytest.raises(PlanError, match="clip_norm=0 must be above 0"):
        Plan().apply(nn.Linear(2, 2), loss=summed, optimizer=momentum, clip_norm=0)
