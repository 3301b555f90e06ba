"""Figures go to TensorBoard, and come out of its files again."""

import time
from pathlib import Path

import pytest

from redline.training.journal import Entry
from redline.training.tensorboard import TensorBoard, is_installed


def entry(step: int, loss: float = 3.0) -> Entry:
    return Entry(step, 1.0, {"loss": loss, "utilization": None, "skipped": 0}, penalties=("z-loss",))


def test_every_figure_is_a_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert is_installed()
    board = TensorBoard(tmp_path)
    for step, loss in ((5, 3.5), (6, 3.25)):
        board(entry(step, loss))
    board(Entry(6, 1.5, {"validation_loss": 3.0}, is_validation=True))
    board.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in seen.Scalars("loss")] == [(5, 3.5), (6, 3.25)]
    assert [(point.step, point.value) for point in seen.Scalars("validation_loss")] == [(6, 3.0)]
    # Nobody knew the first; the others are no figures.
    assert not {"utilization", "step", "elapsed_s", "validation", "penalties"} & set(seen.Tags()["scalars"])


def test_a_full_disk_ends_the_curves_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    board = TensorBoard(tmp_path / "board", said.append)
    board(entry(5))
    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter.add_scalar", full)
    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter.close", full)
    board(entry(5))
    board(entry(5))
    board.close()
    assert said == ["TensorBoard logging stopped: No space left on device"]


def test_a_training_that_does_not_begin_leaves_no_folder(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "board").close()
    assert not (tmp_path / "board").exists()


def test_repeated_steps_are_logged_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The second goes back to a checkpoint of step 5, and says less; the third judges the end of the second.
    for behind, steps in ((0, (5, 6, 7, 8)), (5, (8,)), (8, ())):
        board = TensorBoard(tmp_path).starting_after(behind)
        for step in steps:
            board(entry(step))
        board(Entry(8, 1.5, {"validation_loss": 3.0 + behind}, is_validation=True))
        board.close()
        time.sleep(1.1)  # its files are named by the second
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [point.step for point in seen.Scalars("loss")] == [5, 8]
    assert [(point.step, point.value) for point in seen.Scalars("validation_loss")][-1] == (8, 11.0)
