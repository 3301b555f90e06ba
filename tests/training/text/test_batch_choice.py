"""The batch is found by really training, in whatever precision and plan the settings name."""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.ladder.batch_size import BatchSizeResult, Probe, search
from redline.training.loop import train
from redline.training.text import run as module
from redline.training.text import trained_model as trained_model_module
from redline.training.text.batch_choice import TrainingCase, batch_limit
from redline.training.text.config import TextTraining
from redline.training.text.run import prepare_training

CPU = torch.device("cpu")


def test_a_case_trains(config: Callable[..., Path]) -> None:
    path = config(("batch = 3", 'batch = "auto"'), ("steps = 8", 'steps = 8\nplan = "checkpoint"'))
    case = pickle.loads(pickle.dumps(TrainingCase(TextTraining.read(path), 320)))
    step, items, unit = case.open(5, "cpu")
    assert (items, unit) == (5 * 29, "token")
    step()
    step()


def test_a_case_says_nothing_of_its_own(config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(_asked: str, _device: torch.device) -> str:
        warnings.warn("cpu has no bf16 in hardware.", stacklevel=2)
        return "fp32"

    monkeypatch.setattr(trained_model_module, "resolve_precision", resolve)
    path = config(("batch = 3", 'batch = "auto"'), ('precision = "fp32"', 'precision = "bf16"\noptimizer = "muon"'))
    step, _, _ = TrainingCase(TextTraining.read(path), 320).open(2, "cpu")
    step()


def test_auto_asks_for_it(config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(
        ("batch = 3", 'batch = "auto"'), ("steps = 8", 'steps = 8\nrate_scaling = "linear"\nrate_tokens = 29')
    )
    seen: list[tuple[int, int]] = []

    def find(case: TrainingCase, *, max_batch: int, **_: object) -> BatchSizeResult:
        seen.append((case.vocabulary, max_batch))
        return BatchSizeResult(7, 1000, 2000, (Probe(7, True, 1000, 1.0, 7.0),), "memory", "token")

    monkeypatch.setattr(module, "search", find)
    said: list[str] = []
    task = prepare_training(path, tmp_path / "out", CPU, False, said.append, said.append)
    assert task.training.data.batch == 7 and seen == [(320, max(task.rows.rows // 50, 1))]
    assert task.vocabulary == 320
    assert task.training.loop.learning_rate == pytest.approx(0.07)
    assert any("batch 7: peak memory 1000 B of 1.95 KiB; a larger batch does not fit" in line for line in said)
    assert "learning rate 0.07 for 203 tokens per step (linear scaling)" in said
    # Resumed, it is the batch of before, whatever would be found now.
    train(task, replace(task.training.loop, steps=1), tmp_path / "out", CPU)
    seen.clear()
    again = prepare_training(path, tmp_path / "out", CPU, True, said.append, said.append)
    assert again.training.data.batch == 7 and again.identity == task.identity and not seen
    # Nor is one looked for where the batch of before is none.
    text = path.read_text()
    for old, new, said_of in (
        ('batch = "auto"', 'batch = "auto"\naccumulate = 8', "its 203 tokens per step are not a multiple"),
        ("length = 29", "length = 31", "its length is 29, not 31"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(RedlineError, match=f"belongs to another training run: {said_of}"):
            prepare_training(path, tmp_path / "out", CPU, True, said.append, said.append)
    assert not seen


def test_a_text_lasts_for_some_steps(config: Callable[..., Path]) -> None:
    training = TextTraining.read(config(("batch = 3", 'batch = "auto"\naccumulate = 3')))
    assert batch_limit(training, 1000)[0] == 6 and "fewer than 50 steps" in batch_limit(training, 1000)[1]
    assert batch_limit(training, 20)[0] == 1
    for rows in (None, 10**9):
        assert batch_limit(training, rows) == (4096, "the largest batch that is tried")


@pytest.mark.slow
def test_a_batch_is_really_found(config: Callable[..., Path]) -> None:
    training = TextTraining.read(config(("batch = 3", 'batch = "auto"')))
    told: list[Probe] = []
    found = search(TrainingCase(training, 320), max_batch=4, device="cpu", on_probe=told.append)
    assert found.batch == 4 and found.stopped_by == "max_batch" and [probe.batch for probe in told] == [1, 2, 4]


def test_a_case_holds_gradients_while_it_goes_forward_where_the_loop_does(config: Callable[..., Path]) -> None:
    held: list[bool] = []
    path = config(("batch = 3", 'batch = "auto"\naccumulate = 4'))
    case = TrainingCase(TextTraining.read(path), 320)
    made = trained_model_module.make_trained_model

    def watched(*given: object, **named: object) -> object:
        trained = made(*given, **named)
        forward = trained.forward

        def look(inputs: object) -> object:
            held.append(any(weight.grad is not None for weight in trained.model.parameters()))
            return forward(inputs)

        return replace(trained, forward=look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.training.text.batch_choice.make_trained_model", watched)
        step, items, _ = case.open(5, "cpu")
        step()
    assert held == [False, True] and items == 2 * 5 * 29
