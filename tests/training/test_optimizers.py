"""Every optimizer that can be asked for learns, is saved and goes on exactly; groups and implementations are right."""

import builtins
import copy
import io

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.models.memory import TitanConfig, TitanModel
from redline.training.optimizers import (
    CombinedOptimizer,
    build_optimizer,
    describe,
    hidden_matrices,
    set_rate,
    step_unless,
)
from redline.training.text.config import TextLoopSettings


class Tiny(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(self.embedding(tokens)).relu()))


def settings(**others: object) -> TextLoopSettings:
    return TextLoopSettings(**{"steps": 10, "learning_rate": 0.02, "weight_decay": 0.3, **others})


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    tokens = torch.arange(11)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 3) % 11)
        loss.backward()
        step_unless(~loss.detach().isfinite(), optimizer)
        optimizer.zero_grad()
    return loss.item()


KINDS = ["adam", "adamw", "adafactor", "muon", pytest.param("adamw8bit", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_resumes_exactly_from_a_saved_state(kind: str) -> None:
    # Moments of fewer than 4,096 numbers are not made 8-bit.
    model = Tiny(64 if kind == "adamw8bit" else 8)
    optimizer = build_optimizer(model, settings(optimizer=kind))
    first = learn(model, optimizer, 1)
    learn(model, optimizer, 4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    resumed = build_optimizer(other, settings(optimizer=kind))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert learn(model, optimizer, 20) == learn(other, resumed, 20) < first


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_can_be_set_and_a_bad_step_is_none(kind: str) -> None:
    model = Tiny()
    optimizer = build_optimizer(model, settings(optimizer=kind))
    set_rate(optimizer, 0.5)
    assert all(float(group["lr"]) == 0.5 for group in optimizer.param_groups)
    learn(model, optimizer, 1)
    before = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, torch.nan)
    step_unless(torch.tensor(True), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    step_unless(torch.tensor(False), optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_one_learning_rate_serves_all(kind: str) -> None:
    """Weights as small as models begin with move as far in a step as AdamW moves them."""
    moved = {}
    for name in ("adamw", kind):
        torch.manual_seed(0)
        model = Tiny()
        for weight in model.parameters():
            weight.data.mul_(0.02)
        optimizer = build_optimizer(model, settings(optimizer=name, weight_decay=0.0))
        set_rate(optimizer, 1e-3)
        before = [weight.detach().clone() for weight in model.parameters()]
        learn(model, optimizer, 3)
        moved[name] = sum(float((a - b.detach()).norm()) for a, b in zip(before, model.parameters(), strict=True))
    assert 0.3 < moved[kind] / moved["adamw"] < 3


def test_weight_decay_is_for_matrices() -> None:
    optimizer = build_optimizer(Tiny(), settings())
    assert type(optimizer) is torch.optim.AdamW
    groups = [(group["weight_decay"], {weight.ndim for weight in group["params"]}) for group in optimizer.param_groups]
    assert groups == [(0.3, {2}), (0.0, {1})]
    assert "AdamW of 6 tensors, fused" in describe(optimizer)


def test_muon_updates_only_hidden_matrices() -> None:
    model = Tiny()
    assert [id(weight) for weight in hidden_matrices(model)] == [id(model.hidden.weight)]
    optimizer = build_optimizer(model, settings(optimizer="muon"))
    assert isinstance(optimizer, CombinedOptimizer) and [type(part) for part in optimizer.parts] == [
        torch.optim.Muon,
        torch.optim.AdamW,
    ]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert describe(optimizer).startswith("Muon of 1 tensors and AdamW of 5 tensors")
    with pytest.raises(RedlineError, match="this model has none"):
        build_optimizer(nn.LayerNorm(4), settings(optimizer="muon"))


def test_muon_leaves_taps_scores_and_gates_alone() -> None:
    """They are matrices by their shape, and turn no features into features."""
    model = TitanModel(TitanConfig(vocabulary=50, width=32, layers=4, heads=2, segment=8, memory_slots=4))
    chosen = {id(weight) for weight in hidden_matrices(model)}
    names = {name for name, weight in model.named_parameters() if id(weight) in chosen}
    assert names and all(name.endswith(".weight") for name in names)
    others = {name for name, weight in model.named_parameters() if weight.ndim == 2} - names
    assert any("convolution" in name for name in others) and any("score" in name for name in others)


def test_8_bit_adamw_without_torchao_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object) -> object:
        if name.startswith("torchao"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RedlineError, match="pip install torchao"):
        build_optimizer(Tiny(), settings(optimizer="adamw8bit"))
