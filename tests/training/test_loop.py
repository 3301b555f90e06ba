"""The loop learns, resumes exactly, ends in time, stops when asked, and never saves over a good checkpoint."""

import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.files.partial import owner_mark
from redline.training.checkpoints import FOLDER
from redline.training.journal import read_journal
from redline.training.loop import Outcome, Progress, train
from redline.training.optimizers import build_optimizer
from redline.training.settings import LoopSettings
from redline.training.task import Task

CPU = torch.device("cpu")


class Lines(Task):
    """Fits a line through noise; dropout makes it depend on the random generator too."""

    unit, items_per_step, flops_per_item = "point", 16, 336.0

    def __init__(self, spoil_at: tuple[int, ...] = (), parts: int = 1) -> None:
        self.parts = parts
        with torch.random.fork_rng([]):
            torch.manual_seed(4)
            self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.spoil_at = spoil_at

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"features": 6}

    def optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, settings())

    def loss(self, step: int, part: int = 0) -> Tensor:
        points = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).chunk(self.parts)[part]
        loss = (self.model(points).squeeze(1) - points.sum(1)).square().mean() / self.parts
        return loss * float("nan") if step in self.spoil_at and part == self.parts - 1 else loss

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


def test_it_learns_and_reports_progress(tmp_path: Path) -> None:
    told: list[Progress] = []
    task = Lines()
    before = task.validate(task.model.eval())["error"]
    task.model.train()
    outcome = train(task, settings(steps=200), tmp_path, CPU, on_progress=told.append)
    assert outcome.position.step == 200 and not outcome.interrupted and outcome.peak_bytes > 0
    assert outcome.figures["error"] < before / 3
    assert [seen.step for seen in told[:3]] == [7, 14, 20]
    assert all(seen.items_per_s > 0 and seen.unit == "point" for seen in told)
    entries = read_journal(tmp_path / "journal.jsonl")
    judged = [entry for entry in entries if entry.is_validation]
    assert [entry.step for entry in judged] == list(range(20, 201, 20))
    assert judged[-1].metrics["error"] == outcome.figures["error"]
    rates = [entry.metrics["learning_rate"] for entry in entries if "loss" in entry.metrics]
    assert max(rates) <= 0.02 and rates[-1] < 0.001


@pytest.mark.parametrize("stop_at", [7, 40])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop_at: int) -> None:
    whole = train(Lines(), settings(), tmp_path / "whole", CPU)
    first = train(Lines(), settings(), tmp_path / "parts", CPU, on_progress=interrupt_at(stop_at))
    assert first.interrupted and first.position.step == stop_at
    torch.manual_seed(12345)
    second = train(Lines(), settings(), tmp_path / "parts", CPU, resume=True)
    assert not second.interrupted and second.position.step == 60
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert second.figures == whole.figures and second.position.elapsed_s > first.position.elapsed_s


def test_a_finished_training_is_not_continued(tmp_path: Path) -> None:
    whole = train(Lines(), settings(), tmp_path, CPU)
    saved = {file.name: file.read_bytes() for file in (tmp_path / FOLDER).iterdir()}
    again = train(Lines(), settings(), tmp_path, CPU, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))
    assert again.figures == whole.figures
    assert {file.name: file.read_bytes() for file in (tmp_path / FOLDER).iterdir()} == saved


def test_it_validates_at_its_end_and_not_when_interrupted(tmp_path: Path) -> None:
    def judged(folder: str) -> list[int]:
        return [entry.step for entry in read_journal(tmp_path / folder / "journal.jsonl") if entry.is_validation]

    task = Lines()
    whole = train(task, settings(steps=50), tmp_path / "whole", CPU)
    assert judged("whole") == [20, 40, 50]
    assert whole.figures == task.validate(whole.model.eval())
    stopped = train(Lines(), settings(steps=50), tmp_path / "parts", CPU, on_progress=interrupt_at(28))
    assert stopped.interrupted and judged("parts") == [20]
    resumed = train(Lines(), settings(steps=50), tmp_path / "parts", CPU, resume=True)
    assert judged("parts") == [20, 40, 50] and resumed.figures == whole.figures
    # What was judged at its end goes on as if it had not been.
    longer, all_at_once = (train(Lines(), settings(), tmp_path / name, CPU, name == "parts") for name in ("parts", "x"))
    assert longer.position.step == all_at_once.position.step == 60
    train(Lines(), settings(), tmp_path / "parts", CPU, resume=True)
    assert judged("parts") == [20, 40, 50, 60]


def test_an_existing_training_is_not_overwritten(tmp_path: Path) -> None:
    train(Lines(), settings(steps=3), tmp_path, CPU)
    with pytest.raises(RedlineError, match="already holds a training run"):
        train(Lines(), settings(steps=3), tmp_path, CPU)
    with pytest.raises(RedlineError, match="no checkpoint"):
        train(Lines(), settings(steps=3), tmp_path / "other", CPU, resume=True)


def test_minutes_end_the_training_and_the_schedule_in_time(tmp_path: Path) -> None:
    now_s = [100.0]

    def clock() -> float:
        now_s[0] += 0.01
        return now_s[0]

    timed = settings(steps=None, minutes=0.2, log_every=1, final_share=0.0)
    outcome = train(Lines(), timed, tmp_path, CPU, clock=clock)
    assert 12 <= outcome.position.elapsed_s < 12.5
    rates = [
        entry.metrics["learning_rate"] for entry in read_journal(tmp_path / "journal.jsonl") if "loss" in entry.metrics
    ]
    assert rates[-1] < 1e-3 * max(rates) and len(rates) == outcome.position.step > 50


def test_minutes_count_on_when_resumed(tmp_path: Path) -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.01
        return now_s[0]

    timed = settings(steps=None, minutes=0.1)
    first = train(Lines(), timed, tmp_path, CPU, on_progress=interrupt_at(35), clock=clock)
    now_s[0] = 5000.0
    second = train(Lines(), timed, tmp_path, CPU, resume=True, clock=clock)
    assert first.interrupted and second.position.step > 35
    assert 6 <= second.position.elapsed_s < 6.5


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, parts: int
) -> None:
    """Fused, the device skips; without, the host does: either way the weights are those of before."""

    class Listening(Lines):
        seen: list[list[Tensor]] = []

        def optimizer(self) -> torch.optim.Optimizer:
            if optimizer == "adamw":
                return super().optimizer()
            return torch.optim.Adafactor(self.model.parameters(), 0.01)

        def loss(self, step: int, part: int = 0) -> Tensor:
            self.seen.append([weight.detach().clone() for weight in self.model.parameters()])
            return super().loss(step, part)

    task = Listening(spoil_at=(3, 4, 9), parts=parts)
    task.seen = []
    outcome = train(task, settings(steps=12, log_every=5, skip_limit=3), tmp_path, CPU)
    assert outcome.position.skipped == 3 and all(torch.isfinite(weight).all() for weight in weights(outcome))
    for step in range(11):
        before, after = task.seen[step * parts], task.seen[(step + 1) * parts]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == (step in (3, 4, 9)), step
    entries = [entry for entry in read_journal(tmp_path / "journal.jsonl") if "loss" in entry.metrics]
    assert [entry.metrics["skipped"] for entry in entries] == [2, 3, 3] and all(
        entry.metrics["loss"] > 0 for entry in entries
    )


@pytest.mark.parametrize("first", [0, 30])
def test_too_many_skipped_steps_end_the_training_and_keep_the_checkpoint(tmp_path: Path, first: int) -> None:
    often = settings(checkpoint_minutes=0.0, log_every=50, skip_limit=4)
    said = "the checkpoint of step 29 is kept. Resume it" if first else "no checkpoint was written. Start again"
    with pytest.raises(RedlineError, match=f"4 steps in a row .* not finite; {said} with a lower"):
        train(Lines(tuple(range(first, 60))), often, tmp_path, CPU)
    healed = train(Lines(), often, tmp_path, CPU, resume=first > 0)
    assert healed.position.step == 60 and all(torch.isfinite(weight).all() for weight in weights(healed))
    # Apart by a good one, as many do no harm.
    spread = train(Lines((1, 2, 3, 5, 6, 7)), often, tmp_path / "spread", CPU)
    assert spread.position.skipped == 6


def test_skipped_steps_are_noticed_between_log_lines(tmp_path: Path) -> None:
    rarely = settings(log_every=1000, skip_limit=4)
    with pytest.raises(RedlineError, match="[4-7] steps in a row up to step [4-8] had"):
        train(Lines(tuple(range(60))), rarely, tmp_path, CPU)


def test_skipped_steps_in_a_row_are_counted_across_resumes(tmp_path: Path) -> None:
    """Else a training that is stopped again and again would go on for ever."""
    spoilt = tuple(range(2, 60))
    first = train(Lines(spoilt), settings(steps=5, log_every=1, skip_limit=6), tmp_path, CPU)
    assert first.position.skipped_in_a_row == 3
    with pytest.raises(RedlineError, match="6 steps in a row up to step 8"):
        train(Lines(spoilt), settings(steps=40, log_every=1, skip_limit=6), tmp_path, CPU, resume=True)


def test_a_folder_has_one_running_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    with pytest.raises(RedlineError, match="there is no checkpoint"):
        train(Lines(), settings(steps=4), folder, CPU, resume=True)
    assert not folder.exists()
    train(Lines(), settings(steps=4), folder, CPU)
    held = sorted(path.name for path in folder.iterdir())
    (folder / ".training").write_text(owner_mark())  # a run of this process that is over leaves none
    monkeypatch.setattr("redline.files.partial.os.getpid", lambda: 1)
    for resume in (False, True):
        with pytest.raises(RedlineError, match="a training run is writing to"):
            train(Lines(), settings(steps=8), folder, CPU, resume=resume)
    monkeypatch.undo()
    # Of this machine, and somebody has its number, who began at another time: it was killed, and is gone.
    (folder / ".training").write_text(f"1 {owner_mark().split()[1]} 7")
    train(Lines(), settings(steps=6), folder, CPU, resume=True)
    (folder / ".training").write_text("99999999 ffff\n")  # another machine's, or a process that is gone
    train(Lines(), settings(steps=8), folder, CPU, resume=True)
    assert sorted(path.name for path in folder.iterdir()) == held


def test_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    plain = settings(steps=8)
    whole, parts = Lines(), Lines(parts=4)
    for task in (whole, parts):
        task.model[1].p = 0.0
    one, other = (train(task, plain, tmp_path / str(task.parts), CPU) for task in (whole, parts))
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_without_averaging_the_result_has_the_trained_weights(tmp_path: Path) -> None:
    task = Lines()
    outcome = train(task, settings(steps=21, ema_decay=0.0), tmp_path, CPU)
    assert outcome.model is task.model and outcome.model.training and "error" in outcome.figures


def test_utilization_is_relative_to_the_ceiling(tmp_path: Path) -> None:
    told: list[Progress] = []
    train(Lines(), settings(steps=14), tmp_path, CPU, on_progress=told.append, ceiling_flops_per_s=1e6)
    assert all(seen.utilization == pytest.approx(seen.items_per_s * 336 / 1e6) for seen in told)


@pytest.mark.parametrize("place", ["forward", "optimizer"])
def test_out_of_memory_raises_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    task = Lines()

    def overflow(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if place == "forward":
        monkeypatch.setattr(task, "loss", overflow)
    else:
        # Where moments are made: in the first step.
        monkeypatch.setattr("redline.training.loop.step_unless", overflow)
    with pytest.raises(RedlineError, match="out of memory"):
        train(task, settings(), tmp_path, CPU)


def test_a_validation_that_was_not_finite_stays_so_after_resuming(tmp_path: Path) -> None:
    class Lost(Lines):
        def validate(self, model: nn.Module) -> dict[str, float]:
            return {"error": float("nan")}

    train(Lost(), settings(), tmp_path, CPU, on_progress=interrupt_at(35))
    seen: list[Progress] = []
    said = "ended after 60 steps, 0 of them skipped, but its metrics are not finite; the checkpoint of step"
    with pytest.raises(RedlineError, match=said):
        train(Lost(), settings(), tmp_path, CPU, resume=True, on_progress=seen.append)
    assert math.isnan(seen[0].figures["error"])
    # Its steps were finite: nothing is let go of that somebody may want to look at.
    assert (tmp_path / FOLDER / "step-000000060.pt").is_file()
