"""Equal training runs write equal journals, whenever checkpoints are due and wherever the runs were interrupted."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.training.journal import read_journal
from redline.training.loop import train
from redline.training.settings import LoopSettings
from redline.training.task import Task

CPU = torch.device("cpu")
# What two runs on one machine may differ in; docs/commands/train.md names them.
TIMING = {"items_per_s", "peak_bytes", "utilization"}


class Means(Task):
    """Learns the mean of noise. One step's loss is not finite; `stop_at` is the step in which Ctrl-C is pressed."""

    unit, items_per_step = "point", 8

    def __init__(self, stop_at: int = -1) -> None:
        self.model: nn.Module = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.stop_at = stop_at

    @property
    def identity(self) -> Mapping[str, Any]:
        return {}

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, step: int, part: int = 0) -> Tensor:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)
        points = torch.randn(8, 1, generator=torch.Generator().manual_seed(step))
        return (self.model(points) - 3).square().mean() * (float("nan") if step == 8 else 1.0)

    def validate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"error": float(model(torch.ones(1, 1)) - 3)}


def settings(**others: Any) -> LoopSettings:
    usual = {"steps": 23, "learning_rate": 0.1, "log_every": 7, "validate_every": 12, "checkpoint_minutes": 100.0}
    return LoopSettings(**{**usual, **others})


def journal(folder: Path) -> list[dict[str, Any]]:
    entries = read_journal(folder / "journal.jsonl")
    return [{"step": e.step, **{n: value for n, value in e.metrics.items() if n not in TIMING}} for e in entries]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole")
    train(Means(), settings(), out, CPU)
    entries = journal(out)
    assert [entry["step"] for entry in entries if "loss" in entry] == [7, 12, 14, 21, 23]
    assert entries[-2]["skipped"] == 1
    return entries


def test_checkpoints_write_no_line(tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    train(Means(), settings(checkpoint_minutes=0.0), tmp_path, CPU)
    assert journal(tmp_path) == expected


@pytest.mark.parametrize("stop_at", [9, 15, 20])
def test_a_resumed_training_continues_its_log_interval(
    stop_at: int, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    first = train(Means(stop_at), settings(), tmp_path, CPU)
    assert first.interrupted and first.position.step == stop_at + 1
    assert journal(tmp_path) == [entry for entry in expected if entry["step"] <= stop_at + 1]
    train(Means(), settings(), tmp_path, CPU, resume=True)
    assert journal(tmp_path) == expected
