"""The journal holds every entry once, also over a resumption and a killed process."""

import json
import math
from pathlib import Path

import pytest
from torch import nn

from redline.errors import RedlineError
from redline.training.checkpoints import Position
from redline.training.journal import Entry, Journal, read_journal
from redline.training.loop import Outcome


def test_a_resumed_journal_drops_entries_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 0)
    for step in (10, 20, 30):
        journal.write(Entry(step, 0.1, {"loss": 1 / step}))
    with open(path, "a") as file:
        file.write('{"step": 40, "lo')
    assert [entry.step for entry in read_journal(path)] == [10, 20, 30]
    Journal(path, 20).write(Entry(25, 0.2, {"loss": 0.0}))
    assert [entry.step for entry in read_journal(path)] == [10, 20, 25]
    Journal(path, 0)
    assert path.read_text() == ""


def test_infinity_is_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entry = Entry(1, 0.5, {"psnr": math.inf, "loss": 2.0}, is_validation=True, penalties=("z-loss",))
    Journal(path, 0).write(entry)
    line = {"step": 1, "elapsed_s": 0.5, "validation": True, "psnr": None, "loss": 2.0, "penalties": ["z-loss"]}
    assert json.loads(path.read_text()) == line
    assert read_journal(path) == [entry]


def test_points_of_curves_are_the_finite_values_of_the_journal() -> None:
    entries = [Entry(n, 0.0, {"loss": None if n == 4 else 10.0 / n}) for n in range(1, 9)]
    entries += [Entry(8, 0.0, {"validation_loss": 2.0}, is_validation=True), Entry(9, 0.0, {"loss": math.nan})]
    outcome = Outcome(nn.Identity(), Position(), {}, 0, False, entries=entries)
    assert outcome.series("loss") == tuple((n, 10.0 / n) for n in range(1, 9) if n != 4)
    assert outcome.series("validation_loss") == ((8, 2.0),) and outcome.loss is None


@pytest.mark.parametrize("damage", [b"5", b'{"loss": 1}', b'{"step": 2, "loss": "x"}', b'{"st', b"\xff\xfe"])
def test_damage_in_the_middle_raises_and_at_the_end_is_ignored(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage)
    assert read_journal(path) == [Entry(1, 0.0, {})]
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(RedlineError, match=r"^line 2 of the journal '.*' (is damaged|cannot be read): .*\.$"):
        Journal(path, 3)
