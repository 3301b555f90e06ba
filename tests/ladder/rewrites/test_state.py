"""Models that keep state between calls, and random ones, are named instead of optimized wrongly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.errors import RedlineError, Refused
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.output_check import state_of
from redline.ladder.rung import Rung


class CacheInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(64, 8))
        self.position = 0

    def forward(self, x: Tensor) -> Tensor:
        cache = self.get_buffer("cache")
        cache[self.position] = self.linear(x).mean(0)
        self.position += 1
        return self.linear(x) + cache[: self.position].sum(0)


class CacheInAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.past = y if self.past is None else self.past + y
        return self.past


class AlwaysTraining(nn.Module):
    """Its batch norm stays in train mode, whatever is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> "AlwaysTraining":
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class AlwaysDropping(AlwaysTraining):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.Identity(), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x))


class FunctionalDropout(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5, training=True)


class Lazy(nn.Linear):
    """Fills a cache at its first call, counts its calls, and remembers its last output; none of it is an input."""

    table: Tensor | None = None
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(8)
        self.calls += 1
        self.last = super().forward(input) * self.table
        return self.last


KEPT = [
    (CacheInBuffer, "buffer 'cache'"),
    (CacheInAttribute, "attribute 'past'"),
    (AlwaysTraining, "batch norm 'norm'"),
]
RANDOM = [(AlwaysDropping, "dropout of 0.4 in 'drop'"), (FunctionalDropout, "an operation in its forward pass")]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return (kind(8, 8) if issubclass(kind, nn.Linear) else kind()).eval()


@pytest.mark.parametrize("kind, name", [*KEPT, *RANDOM])
def test_state_and_randomness_are_named_and_the_model_is_not_changed(kind: type[nn.Module], name: str) -> None:
    model = made(kind)
    before, attributes = copy.deepcopy(model.state_dict()), {k: v for k, v in vars(model).items() if k[0] != "_"}
    random = torch.get_rng_state()
    state = state_of(Job.of(model, (torch.randn(4, 8), torch.randn(4, 8)), share=True))
    assert name in str(state)
    assert bool(state.random) == ((kind, name) in RANDOM)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {k: v for k, v in vars(model).items() if k[0] != "_"} == attributes
    assert not torch.equal(random, torch.get_rng_state()), "only the samples above drew numbers"


@pytest.mark.parametrize("kind", [nn.Linear, Lazy])
def test_a_model_without_state_has_none(kind: type[nn.Module]) -> None:
    assert not str(state_of(Job.of(made(kind), (torch.randn(4, 8),))))


@pytest.mark.parametrize("kind, name", [*KEPT, *RANDOM])
def test_onnxruntime_refuses_a_model_that_it_would_freeze(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(Unavailable, match=f"{name}.*lost when the model is exported"):
        Plan.parse("onnxruntime").apply(made(kind), torch.randn(4, 8), check=False)


@pytest.mark.parametrize("kind", [CacheInBuffer, CacheInAttribute, AlwaysTraining])
def test_checking_leaves_the_state_as_it_was(kind: type[nn.Module]) -> None:
    model, batch = made(kind), torch.randn(4, 8)
    fast = Plan().apply(copy.deepcopy(model), batch)
    for _ in range(3):
        torch.testing.assert_close(fast(batch), model(batch))


def test_a_model_in_training_mode_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
    with pytest.warns(UserWarning, match=r"training mode \(dropout of 0.3 in '2', batch norm '1'.*call eval\(\) first"):
        Plan().apply(model, torch.randn(4, 8))
    assert model.training
    Plan().apply(model, torch.randn(4, 8), check=False)
    Plan().apply(nn.Linear(8, 8), torch.randn(4, 8))


@pytest.fixture
def wrong_rung(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan that changes the output."""

    def apply(self: Rung, job: Job) -> Job:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(1.5)
        return job

    plan = Plan.parse("cudnn_benchmark")
    monkeypatch.setattr(type(plan.rungs[0]), "why_not", lambda *_: "")
    monkeypatch.setattr(type(plan.rungs[0]), "apply", apply)
    return plan


def test_a_wrong_output_is_refused(wrong_rung: Plan) -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    with pytest.raises(Refused, match="differs from that of the model on the samples: relative_error 0.5 "):
        wrong_rung.apply(model, [batch, batch + 1])
    wrong_rung.apply(model, batch, check=False)
    wrong_rung.apply(model)


def test_a_random_model_cannot_be_checked(wrong_rung: Plan) -> None:
    with pytest.warns(UserWarning, match="cannot be checked, because the model is random"):
        wrong_rung.apply(made(FunctionalDropout), torch.randn(4, 8))


def reference(pool: Any, address: str, path: Any) -> Any:
    worker = pool.start()
    try:
        return worker.ask(
            "reference", 60, address=address, shapes={"": {}}, device="cpu", dtype="fp32",
            paths={(10, 11, 12): str(path)},
        )  # fmt: skip
    finally:
        worker.stop()


@pytest.mark.parametrize("kind, name", [*KEPT, *RANDOM])
def test_a_climb_names_state_and_refuses_randomness(kind: type, name: str, lent_pool: Any, tmp_path: Any) -> None:
    arguments = "8, 8" if issubclass(kind, nn.Linear) else ""
    source = f"""
import sys
import torch
import redline
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_state import {kind.__name__}

def mine():
    return redline.Workload(lambda: {kind.__name__}({arguments}), lambda seed: torch.randn(4, 8))
"""
    (tmp_path / "mine.py").write_text(source)
    if (kind, name) in RANDOM:
        with pytest.raises(RedlineError, match=f"the model is random .*{name}"):
            reference(lent_pool, f"{tmp_path}/mine.py:mine", tmp_path / "reference.pt")
    else:
        assert name in reference(lent_pool, f"{tmp_path}/mine.py:mine", tmp_path / "reference.pt")["state"]
