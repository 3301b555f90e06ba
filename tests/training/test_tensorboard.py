"""Figures go to TensorBoard, and come out of its files again."""

import time
from pathlib import Path

import pytest

from redline.training.loop import Progress
from redline.training.tensorboard import TensorBoard, is_installed


def test_every_figure_is_a_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert is_installed()
    board = TensorBoard(tmp_path)
    for step, loss in ((5, 3.5), (6, 3.25)):
        board(Progress(step, 1.0, 2.0, loss, 0.7, 1e-3, 100.0, "token", 10, None, 0, {"validation_loss": loss - 0.25}))
    board.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in seen.Scalars("loss")] == [(5, 3.5), (6, 3.25)]
    assert [point.value for point in seen.Scalars("validation_loss")] == [3.25, 3.0]
    assert "utilization" not in seen.Tags()["scalars"]  # nobody knew it


def test_a_full_disk_ends_the_curves_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    board = TensorBoard(tmp_path / "board", said.append)
    progress = Progress(5, 1.0, 2.0, 3.0, 0.7, 1e-3, 100.0, "token", 10)
    board(progress)
    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter.add_scalar", full)
    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter.close", full)
    board(progress)
    board(progress)
    board.close()
    assert said == ["TensorBoard gets no more: No space left on device"]


def test_a_training_that_does_not_begin_leaves_no_folder(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "board").close()
    assert not (tmp_path / "board").exists()


def test_what_is_done_again_is_drawn_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((5, 6, 7), (6, 7)):
        board = TensorBoard(tmp_path)
        for step in steps:
            board(Progress(step, 1.0, 2.0, 3.0, 0.7, 1e-3, 100.0, "token", 10))
        board.close()
        time.sleep(1.1)  # its files are named by the second
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [point.step for point in seen.Scalars("loss")] == [5, 6, 7]
