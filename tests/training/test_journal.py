"""The journal holds every entry once, also over a resumption and a killed process."""

import json
import math
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.training.journal import Journal, read_journal


def test_a_resumed_journal_drops_entries_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 0)
    for step in (10, 20, 30):
        journal.write({"step": step, "loss": 1 / step})
    with open(path, "a") as file:
        file.write('{"step": 40, "lo')
    assert [entry["step"] for entry in read_journal(path)] == [10, 20, 30]
    Journal(path, 20).write({"step": 25, "loss": 0.0})
    assert [entry["step"] for entry in read_journal(path)] == [10, 20, 25]
    Journal(path, 0)
    assert path.read_text() == ""


def test_infinity_is_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, 0).write({"step": 1, "psnr": math.inf})
    assert json.loads(path.read_text()) == {"step": 1, "psnr": None}


@pytest.mark.parametrize("damage", [b"5", b'{"loss": 1}', b'{"st', b"\xff\xfe"])
def test_damage_in_the_middle_raises_and_at_the_end_is_ignored(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage)
    assert read_journal(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(RedlineError, match=r"^line 2 of the journal '.*' (is damaged|cannot be read): .*\.$"):
        Journal(path, 3)
