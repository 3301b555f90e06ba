"""Figures go to TensorBoard where it is installed."""

import sys
import types
from pathlib import Path

import pytest

from redline.training.loop import Progress
from redline.training.tensorboard import TensorBoard


def test_every_figure_is_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    package = types.ModuleType("torch.utils.tensorboard")
    writer = types.ModuleType("torch.utils.tensorboard.writer")
    writer.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", writer)
    board = TensorBoard(tmp_path)
    board(Progress(5, 1.0, 2.0, 3.5, 0.7, 1e-3, 100.0, "token", 10, None, 0, {"validation_loss": 3.25}))
    board.close()
    assert ("loss", 3.5, 5) in written and ("validation_loss", 3.25, 5) in written and written[-1][0] == "closed"
    assert "utilization" not in {name for name, *_ in written}
