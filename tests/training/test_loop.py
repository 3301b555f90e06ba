"""The loop learns, resumes exactly, ends in time, stops when asked, and never saves over a good checkpoint."""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.training.checkpoints import NAME
from redline.training.journal import read_journal
from redline.training.loop import Outcome, Progress, train
from redline.training.settings import LoopSettings

CPU = torch.device("cpu")


class Lines:
    """Fits a line through noise; dropout makes it depend on the random generator too."""

    unit, items_per_step = "point", 16

    def __init__(self, spoil_at: int = -1) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(4)
            self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.spoil_at = spoil_at

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"features": 6}

    def loss(self, step: int) -> Tensor:
        points = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = (self.model(points).squeeze(1) - points.sum(1)).square().mean()
        return loss * float("nan") if step == self.spoil_at else loss

    def validate(self, model: nn.Module) -> dict[str, float]:
        points = torch.randn(64, 6, generator=torch.Generator().manual_seed(10**6))
        with torch.no_grad():
            return {"error": float((model(points).squeeze(1) - points.sum(1)).square().mean())}


def settings(**others: Any) -> LoopSettings:
    usual = {"steps": 60, "learning_rate": 0.02, "warmup_steps": 5, "log_every": 7, "validate_every": 20}
    return LoopSettings(**{**usual, "ema_decay": 0.9, **others})


def interrupt_at(step: int) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        if progress.step == step:
            signal.raise_signal(signal.SIGINT)

    return tell


def weights(outcome: Outcome) -> list[Tensor]:
    return [weight.clone() for weight in outcome.model.parameters()]


def test_learns_and_says_how_it_goes(tmp_path: Path) -> None:
    told: list[Progress] = []
    task = Lines()
    before = task.validate(task.model.eval())["error"]
    task.model.train()
    outcome = train(task, settings(steps=200), tmp_path, CPU, tell=told.append)
    assert outcome.position.step == 200 and not outcome.interrupted and outcome.peak_bytes > 0
    assert outcome.figures["error"] < before / 3
    assert [seen.step for seen in told[:3]] == [7, 14, 20]
    assert all(seen.items_per_s > 0 and seen.unit == "point" for seen in told)
    entries = read_journal(tmp_path / "journal.jsonl")
    judged = [entry for entry in entries if entry.get("validation")]
    assert [entry["step"] for entry in judged] == list(range(20, 201, 20))
    assert judged[-1]["error"] == outcome.figures["error"]
    rates = [entry["learning_rate"] for entry in entries if "loss" in entry]
    assert max(rates) <= 0.02 and rates[-1] < 0.001


@pytest.mark.parametrize("stop_at", [7, 40])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, stop_at: int) -> None:
    whole = train(Lines(), settings(), tmp_path / "whole", CPU)
    first = train(Lines(), settings(), tmp_path / "parts", CPU, tell=interrupt_at(stop_at))
    assert first.interrupted and first.position.step == stop_at
    torch.manual_seed(12345)
    second = train(Lines(), settings(), tmp_path / "parts", CPU, resume=True)
    assert not second.interrupted and second.position.step == 60
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert second.figures == whole.figures and second.position.elapsed_s > first.position.elapsed_s


def test_a_finished_one_is_not_trained_further(tmp_path: Path) -> None:
    whole = train(Lines(), settings(), tmp_path, CPU)
    saved = (tmp_path / NAME).read_bytes()
    again = train(Lines(), settings(), tmp_path, CPU, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))
    assert again.figures == whole.figures and (tmp_path / NAME).read_bytes() == saved


def test_a_training_is_not_written_over(tmp_path: Path) -> None:
    train(Lines(), settings(steps=3), tmp_path, CPU)
    with pytest.raises(RedlineError, match="holds a training already"):
        train(Lines(), settings(steps=3), tmp_path, CPU)
    with pytest.raises(RedlineError, match="no checkpoint"):
        train(Lines(), settings(steps=3), tmp_path / "other", CPU, resume=True)


def test_ends_in_time_with_the_schedule_at_its_end(tmp_path: Path) -> None:
    now_s = [100.0]

    def clock() -> float:
        now_s[0] += 0.01
        return now_s[0]

    timed = settings(steps=None, minutes=0.5, log_every=1, final_share=0.0)
    outcome = train(Lines(), timed, tmp_path, CPU, clock=clock)
    assert 30 <= outcome.position.elapsed_s < 30.5
    rates = [entry["learning_rate"] for entry in read_journal(tmp_path / "journal.jsonl") if "loss" in entry]
    assert rates[-1] < 1e-3 * max(rates) and len(rates) == outcome.position.step > 100


def test_minutes_count_on_when_resumed(tmp_path: Path) -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.01
        return now_s[0]

    timed = settings(steps=None, minutes=0.2)
    first = train(Lines(), timed, tmp_path, CPU, tell=interrupt_at(70), clock=clock)
    now_s[0] = 5000.0
    second = train(Lines(), timed, tmp_path, CPU, resume=True, clock=clock)
    assert first.interrupted and second.position.step > 70
    assert 12 <= second.position.elapsed_s < 12.5


@pytest.mark.parametrize("spoil_at", [3, 33])
def test_a_loss_that_is_not_finite_spares_the_checkpoint(tmp_path: Path, spoil_at: int) -> None:
    # A checkpoint after every step: the spoilt one must be noticed before it is written.
    always = settings(checkpoint_minutes=0.0, log_every=50)
    with pytest.raises(RedlineError, match="stopped being finite.* checkpoint of step"):
        train(Lines(spoil_at), always, tmp_path, CPU)
    healed = train(Lines(), always, tmp_path, CPU, resume=True)
    assert healed.position.step == 60 and all(torch.isfinite(weight).all() for weight in weights(healed))
    entries = [entry for entry in read_journal(tmp_path / "journal.jsonl") if "loss" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, 61))


def test_too_little_memory_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Lines()

    def overflow(_step: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(task, "loss", overflow)
    with pytest.raises(RedlineError, match="too little memory"):
        train(task, settings(), tmp_path, CPU)


def test_weight_decay_and_both_optimizers(tmp_path: Path) -> None:
    from redline.training.optimizers import build_optimizer

    for name, kind in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        optimizer = build_optimizer(Lines().model, settings(optimizer=name, weight_decay=0.3), CPU)
        assert type(optimizer) is kind
        assert [(g["weight_decay"], {w.ndim for w in g["params"]}) for g in optimizer.param_groups] == [
            (0.3, {2}),
            (0.0, {1}),
        ]
