"""The batch is found by really training, in whatever precision and plan the settings name."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.batch_size import BatchSizeResult, Probe
from redline.training.loop import train
from redline.training.text import run as module
from redline.training.text.batch_choice import TrainingCase, find_batch
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


def test_auto_asks_for_it(config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(
        ("batch = 3", 'batch = "auto"'), ("steps = 8", 'steps = 8\nrate_scaling = "linear"\nrate_tokens = 29')
    )
    seen: list[int] = []

    def find(training: TextTraining, vocabulary: int, *_: object) -> BatchSizeResult:
        seen.append(vocabulary)
        return BatchSizeResult(7, 1000, 2000, (Probe(7, True, 1000, 1.0, 7.0),), "memory", "token")

    monkeypatch.setattr(module, "find_batch", find)
    said: list[str] = []
    task = prepare_training(path, tmp_path / "out", CPU, False, said.append, said.append)
    assert task.training.data.batch == 7 and seen == [task.vocabulary] == [320]
    assert task.training.loop.learning_rate == pytest.approx(0.07)
    assert any("batch 7: 1000 B of 1.95 KiB" in line for line in said)
    # Resumed, it is the batch of before, whatever would be found now.
    train(task, replace(task.training.loop, steps=1), tmp_path / "out", CPU)
    seen.clear()
    again = prepare_training(path, tmp_path / "out", CPU, True, said.append, said.append)
    assert again.training.data.batch == 7 and again.identity == task.identity and not seen


@pytest.mark.slow
def test_a_batch_is_really_found(config: Callable[..., Path]) -> None:
    training = TextTraining.read(config(("batch = 3", 'batch = "auto"')))
    told: list[Probe] = []
    from redline.batch_size import search

    found = search(TrainingCase(training, 320), device="cpu", max_batch=4, on_probe=told.append)
    assert found.batch == 4 and found.stopped_by == "max_batch" and [probe.batch for probe in told] == [1, 2, 4]
    assert find_batch.__module__ == TrainingCase.__module__
