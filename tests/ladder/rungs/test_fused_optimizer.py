import copy
import sys
import tomllib
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.fused_optimizer import FusedOptimizer, implementation, rebuild
from redline.machine.machine import Machine


def squared(output: Tensor, batch: Any) -> Tensor:
    return (output - 1).square().mean()


def model_of(device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).to(device)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=0.01)


def adam_amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def sgd_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(model: nn.Module, plan: str, factory: Any, batches: list[Tensor]) -> tuple[list[Tensor], str, Any]:
    machine = Machine.detect(str(batches[0].device))
    built, job = Plan.parse(plan).build(Job.of(model, loss=squared, optimizer=factory), machine)
    step = job.finish()
    for batch in batches:
        step(batch)
    proof = built.rungs[0].proof(job) if built.rungs else ""
    return [p.detach().clone() for p in job.parameters.values()], proof, step


def batches_of(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(11, 7, device=device) for _ in range(5)]


@pytest.mark.parametrize("factory", [adamw, two_groups, adam_amsgrad, sgd_momentum, sgd])
@pytest.mark.parametrize("backend", ["fused", "foreach"])
def test_five_steps_are_those_of_the_plain_optimizer(backend: str, factory: Any) -> None:
    model, batches = model_of(), batches_of()
    start = [p.detach().clone() for p in model.parameters()]
    expected, _, _ = trained(model, "eager", factory, batches)
    seen, proof, step = trained(model, f"fused_optimizer(backend={backend})", factory, batches)
    for before, plain, fast in zip(start, expected, seen, strict=True):
        assert not torch.allclose(before, plain, atol=1e-3), "the optimizer did nothing, so the test shows nothing"
        # Both do the same fp32 operations in another order: a few units in the last place over five steps.
        torch.testing.assert_close(fast, plain, rtol=5e-6, atol=1e-6)
    assert f"with its {backend} implementation (before: plain)" in proof and "4 weight tensors" in proof
    assert all(group[backend] is True for group in step.optimizer.param_groups)


def test_groups_and_settings_are_kept() -> None:
    own = two_groups(model_of().parameters())
    made = rebuild(own, "fused")
    assert type(made) is type(own) and made is not own
    for before, after in zip(own.param_groups, made.param_groups, strict=True):
        assert after["fused"] is True and not after["foreach"]
        apart = ("params", "fused", "foreach")
        assert {k: v for k, v in before.items() if k not in apart} == {k: v for k, v in after.items() if k not in apart}
        assert all(a is b for a, b in zip(before["params"], after["params"], strict=True))


def test_state_is_kept() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    batches = batches_of()

    def step(of: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        squared(of(batch), None).backward()
        optimizer.step()

    plain, own = adamw(twin.parameters()), adamw(model.parameters())
    for batch in batches[:2]:
        step(twin, plain, batch)
        step(model, own, batch)
    made = rebuild(own, "fused")
    assert implementation(made) == "fused"
    assert made.state[next(model.parameters())]["step"] == 2
    for batch in batches[2:]:
        step(twin, plain, batch)
        step(model, made, batch)
    for expected, seen in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(seen, expected, rtol=5e-6, atol=1e-6)


def test_auto_resolves_to_the_best_backend() -> None:
    rung = FusedOptimizer().resolve(Job.of(model_of(), loss=squared, optimizer=adamw))
    assert rung == FusedOptimizer("fused")
    rmsprop = Job.of(model_of(), loss=squared, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01))
    assert FusedOptimizer().resolve(rmsprop) == FusedOptimizer("foreach")
    lbfgs = Job.of(model_of(), loss=squared, optimizer=lambda p: torch.optim.LBFGS(p))
    assert FusedOptimizer().resolve(lbfgs) == FusedOptimizer("plain")


def test_unsupported_optimizer_is_named() -> None:
    machine = Machine.detect("cpu")
    job = Job.of(model_of(), loss=squared, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01))
    assert FusedOptimizer("fused").why_not(machine, job) == "RMSprop has no fused= implementation"
    assert FusedOptimizer("foreach").why_not(machine, job) == ""
    differentiable = replace(job, optimizer=lambda p: torch.optim.Adam(p, differentiable=True))
    assert "Adam" in FusedOptimizer("fused").why_not(machine, differentiable)
    with pytest.raises(Unavailable, match="RMSprop"):
        Plan.parse("fused_optimizer(backend=fused)").build(job, machine)


def test_missing_apex_is_reported() -> None:
    machine = Machine.detect("cpu")
    assert "CUDA" in FusedOptimizer("apex").why_not(machine)
    cuda = replace(machine, device="cuda:0", versions={"torch": torch.__version__})
    assert "not installed" in FusedOptimizer("apex").why_not(cuda)
    assert FusedOptimizer.variants(cuda) == (FusedOptimizer("fused"),)
    with_apex = replace(cuda, versions={"apex": "0.1"})
    assert FusedOptimizer("apex") in FusedOptimizer.variants(with_apex)
    assert FusedOptimizer("apex").why_not(with_apex) == ""


def test_apex_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: Any = (),
            weight_decay: float = 0.0,
            adam_w_mode: bool = True,
        ) -> None:
            self.adam_w_mode = adam_w_mode
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    FusedAdam.__module__ = "apex.optimizers.fused_adam"
    apex = types.ModuleType("apex.optimizers")
    apex.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", apex)
    made = rebuild(adamw(model_of().parameters()), "apex")
    assert isinstance(made, FusedAdam) and made.adam_w_mode and implementation(made) == "apex"
    assert made.defaults == {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    plain_adam = rebuild(torch.optim.Adam(model_of().parameters()), "apex")
    assert isinstance(plain_adam, FusedAdam) and not plain_adam.adam_w_mode
    with pytest.raises(RungError, match="amsgrad"):
        rebuild(adam_amsgrad(model_of().parameters()), "apex")
    with pytest.raises(RungError, match="RMSprop"):
        rebuild(torch.optim.RMSprop(model_of().parameters()), "apex")


def test_proof_is_empty_if_nothing_changes() -> None:
    def already(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    _, proof, _ = trained(model_of(), "fused_optimizer(backend=fused)", already, batches_of())
    assert proof == ""
    job = FusedOptimizer("fused").apply(Job.of(model_of(), loss=squared, optimizer=adamw))
    assert FusedOptimizer("fused").proof(job) == "", "no optimizer was made yet"


def test_the_users_model_and_optimizer_stay_as_they_are() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    made: list[torch.optim.Optimizer] = []

    def remembering(parameters: Any) -> torch.optim.Optimizer:
        made.append(adamw(parameters))
        return made[-1]

    trained(model, "fused_optimizer", remembering, batches_of())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert made and all(group["fused"] is None for own in made for group in own.param_groups)


def test_round_trip() -> None:
    plan = Plan((FusedOptimizer("foreach"),))
    assert str(plan) == "fused_optimizer(backend=foreach)"
    assert Plan.parse(str(plan)) == plan == Plan.from_document(tomllib.loads(plan.to_toml()))
    assert str(Plan((FusedOptimizer(),))) == "fused_optimizer"
    with pytest.raises(RungError, match="backend"):
        FusedOptimizer("magic")


@pytest.mark.gpu
@pytest.mark.parametrize("factory", [adamw, two_groups, adam_amsgrad, sgd_momentum])
def test_on_a_gpu(factory: Any) -> None:
    model, batches = model_of("cuda"), batches_of("cuda")
    expected, _, _ = trained(model, "fused_optimizer(backend=plain)", factory, batches)
    seen, proof, _ = trained(model, "fused_optimizer(backend=fused)", factory, batches)
    for plain, fast in zip(expected, seen, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    assert "fused implementation (before: foreach)" in proof
